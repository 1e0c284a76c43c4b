"""`TrainingArguments(deepspeed=...)` with the stock Trainer; the package in `shim/` is on the path of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tests.training.hf_cases import launched, read, reloaded, shared, told, trainer_of

CONFIG: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}


def config_of(tp: int, stage: int) -> dict[str, Any]:
    zero = {"stage": stage, "gather_16bit_weights_on_model_save": True, "reduce_bucket_size": "auto"}
    return {**CONFIG, "zero_optimization": zero, "tensor_parallel": {"autotp_size": tp}}


def trains_alike(tp: int, dp: int, stage: int) -> None:
    launched()
    folder = shared() / f"shim-{tp}-{stage}"
    more: dict[str, Any] = {
        "dp": dp,
        "start": partial(AutoModelForCausalLM.from_pretrained, shared() / "start", dtype=torch.float32),
        "deepspeed": config_of(tp, stage),
        "eval_strategy": "no",
        "save_strategy": "steps",
        "save_steps": 7,
        "include_num_input_tokens_seen": "no",
    }
    trainer = trainer_of(Trainer, folder, **more)
    trainer.train()
    assert isinstance(trainer.model_wrapped, deepspeed.DeepSpeedEngine)
    assert type(trainer.model_wrapped.engine).__module__.startswith("phalanx.")
    assert deepspeed.ops.adam.FusedAdam.__module__.startswith("phalanx.")
    expected = [entry for entry in read("stock-fp32-1")[0] if "loss" in entry]
    got = [entry for entry in told(trainer) if "loss" in entry]
    for one, other in zip(got, expected, strict=True):
        other.pop("num_input_tokens_seen")
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    ids = torch.arange(3, 19).view(2, 8)
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(input_ids=ids).logits
        trainer.save_model(str(folder / "last"))
        trainer.accelerator.wait_for_everyone()
        torch.testing.assert_close(logits, reloaded(folder / "last")(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    again = trainer_of(Trainer, folder, **more)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-7"))
    assert [entry for entry in told(again) if "loss" in entry] == got


def resized_at_stage_3() -> None:
    """transformers then resizes embeddings within `deepspeed.zero.GatheredParameters`, the biases that are not there
    among them."""
    launched()
    arguments = TrainingArguments(
        output_dir=str(shared() / "resized"), use_cpu=True, report_to=[], deepspeed=config_of(1, 3)
    )
    model = AutoModelForCausalLM.from_pretrained(shared() / "start", dtype=torch.float32)
    head = model.get_output_embeddings().weight.detach().clone()
    model.resize_token_embeddings(len(head) + 1, mean_resizing=False)
    trainer = Trainer(model=model, args=arguments)
    grown = trainer.model.get_output_embeddings().weight
    assert len(grown) == len(head) + 1 and torch.equal(grown[:-1], head)


def cases(world: int) -> dict[str, Callable[[], None]]:
    grids = {2: [(2, 1, 1), (1, 2, 3)], 4: [(2, 2, 2)]}[world]
    found: dict[str, Callable[[], None]] = {"resized": resized_at_stage_3} if world == 2 else {}
    return found | {f"shim with tp, dp, stage {grid}": partial(trains_alike, *grid) for grid in grids}
