"""SFTTrainer of TRL, stock in one process and with the mixin on ranks; with a LoRA adapter too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from phalanx.training.hf import TPTrainerMixin
from tests.parallel.models import tiny_model
from tests.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer
from tests.training.hf_cases import launched, read, shared, write

STEPS = 4
LOGGED = ("loss", "grad_norm", "learning_rate", "epoch", "entropy", "mean_token_accuracy", "num_tokens", "eval_loss")
EVALUATED = ("eval_entropy", "eval_mean_token_accuracy")


class MixedSFT(TPTrainerMixin, SFTTrainer): ...


def run(kind: type[SFTTrainer], name: str, *, lora: bool, dp: int = 1, config: Any = None) -> Any:
    torch.manual_seed(0)
    folder = shared() / name
    model = tiny_model("llama", dtype=torch.float32, vocab_size=VOCAB_SIZE + 1, pad_token_id=0)
    if config is None:
        model.save_pretrained(shared() / "base")
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "<unk>"
    texts = [{"prompt": f"say {n} times {n}", "completion": f" it is {n * n}"} for n in range(32)]
    arguments = SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=4 // dp,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        max_length=24,
        learning_rate=5e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        seed=3,
    )
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    given = {} if config is None else {"phalanx_config": config}
    trainer = kind(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(texts),
        eval_dataset=Dataset.from_list(texts[:8]),
        processing_class=tokenizer,
        peft_config=adapter if lora else None,
        **given,
    )
    trainer.train()
    trainer.save_model(str(folder))
    trainer.accelerator.wait_for_everyone()
    return trainer


def told(trainer: Any) -> list[dict[str, float]]:
    return [{k: v for k, v in entry.items() if k in LOGGED + EVALUATED} for entry in trainer.state.log_history]


def without(names: tuple[str, ...], entry: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in entry.items() if name not in names}


def logits(folder: Path) -> Any:
    """Of what was saved, through stock PEFT and transformers."""
    base = AutoModelForCausalLM.from_pretrained(shared() / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder).merge_and_unload().eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 19).view(2, 8)).logits


def stock(name: str) -> None:
    trainer = run(SFTTrainer, f"stock-{name}", lora=name == "lora")
    write(f"stock-{name}", told(trainer))


def same_as_stock(name: str, tp: int, dp: int, stage: int) -> None:
    launched()
    config = {"tensor_parallel": {"autotp_size": tp}, "zero_optimization": {"stage": stage}}
    trainer = run(MixedSFT, f"{name}-{tp}-{stage}", lora=name == "lora", dp=dp, config=config)
    for got, expected in zip(told(trainer), read(f"stock-{name}"), strict=True):
        # TRL takes the mean over evaluated batches, each over all copies of the model together.
        left_out = EVALUATED if dp > 1 else ()
        torch.testing.assert_close(without(left_out, got), without(left_out, expected), rtol=1e-5, atol=1e-5)
    if name == "lora":
        got, expected = logits(shared() / f"{name}-{tp}-{stage}"), logits(shared() / f"stock-{name}")
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def cases(world: int) -> dict[str, Callable[[], None]]:
    if world == 1:
        return {f"stock {name}": partial(stock, name) for name in ("whole", "lora")}
    found: dict[str, Callable[[], None]] = {}
    for grid in {2: [(2, 1, 0)], 4: [(2, 2, 1), (2, 2, 3)]}[world]:
        for name in ("whole", "lora") if grid[2] < 3 else ("whole",):
            found[f"{name} with tp, dp, stage {grid}"] = partial(same_as_stock, name, *grid)
    return found
