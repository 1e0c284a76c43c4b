"""Trainers of transformers, stock in one process and with the mixin on ranks: what they log and save is the same."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from phalanx.config import ConfigError
from phalanx.training.hf import TPTrainerMixin
from tests.parallel.models import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

SAMPLES, EVALUATED, STEPS = 40, 10, 10


class MixedTrainer(TPTrainerMixin, Trainer): ...


def shared() -> Path:
    """Where all starts of ranks of one test find what the others have left."""
    return Path(sys.argv[3]).parent


def launched() -> None:
    """What torchrun would have said."""
    if (world := dist.get_world_size()) > 1:
        rank = str(dist.get_rank())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))


def samples(count: int, seed: int, vocab_size: int) -> list[dict[str, list[int]]]:
    """Of different lengths, and with different numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in torch.randint(4, 12, (count,), generator=generator).tolist():
        ids = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
        ignored = length // 3
        made.append({"input_ids": ids, "labels": [-100] * ignored + ids[ignored:]})
    return made


def collate(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    width = max(len(sample["input_ids"]) for sample in batch)

    def padded(values: list[int], value: int) -> list[int]:
        return values + [value] * (width - len(values))

    return {
        "input_ids": torch.tensor([padded(s["input_ids"], 0) for s in batch]),
        "attention_mask": torch.tensor([padded([1] * len(s["input_ids"]), 0) for s in batch]),
        "labels": torch.tensor([padded(s["labels"], -100) for s in batch]),
    }


def accuracy(prediction: Any) -> dict[str, float]:
    guessed, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    return {"accuracy": float((guessed == labels)[labels != -100].mean()), "samples": float(len(labels))}


def build(seed: int = 0, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    return tiny_model("llama_tied", dtype=torch.float32, vocab_size=1003, **changes)


def trainer_of(
    kind: type[Trainer], folder: Path, *, dp: int = 1, config: Any = None, start: Callable[[], Any] = build, **more: Any
) -> Trainer:
    arguments = TrainingArguments(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "per_device_train_batch_size": 4 // dp,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "max_steps": STEPS,
            "learning_rate": 5e-3,
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "include_num_input_tokens_seen": "non_padding",
            "eval_strategy": "steps",
            "eval_steps": 5,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "seed": 3,
            **more,
        }
    )
    model = start()
    given = {} if config is None else {"phalanx_config": config}
    return kind(
        model=model,
        args=arguments,
        train_dataset=samples(SAMPLES, 1, model.config.vocab_size),
        eval_dataset=samples(EVALUATED, 2, model.config.vocab_size),
        data_collator=collate,
        compute_metrics=accuracy,
        **given,
    )


LOGGED = ("loss", "grad_norm", "learning_rate", "epoch", "num_input_tokens_seen", "step")
EVALUATION = ("eval_loss", "eval_accuracy", "eval_samples")
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
}


def told(trainer: Any) -> list[dict[str, float]]:
    """What a run has logged, without times."""
    return [{k: v for k, v in entry.items() if k in LOGGED + EVALUATION} for entry in trainer.state.log_history]


def write(name: str, value: Any) -> None:
    if dist.get_rank() == 0:
        (shared() / f"{name}.json").write_text(json.dumps(value))


def read(name: str) -> Any:
    return json.loads((shared() / f"{name}.json").read_text())


def stock(name: str) -> None:
    """On two ranks, this is DistributedDataParallel, of which only the evaluation is of interest: the Trainer weighs
    the losses of ranks by their tokens, so that they differ from those of one process."""
    launched()
    dp = dist.get_world_size()
    if dp == 1:
        build().save_pretrained(shared() / "start")
    trainer = trainer_of(Trainer, shared() / f"stock-{name}", dp=dp, **KINDS[name])
    trainer.train()
    predicted = trainer.predict(trainer.eval_dataset)
    write(f"stock-{name}-{dp}", [told(trainer), predicted.metrics["test_loss"], predicted.predictions.tolist()])


def same_as_stock(name: str, tp: int, dp: int, stage: int) -> None:
    launched()
    config = {"tensor_parallel": {"autotp_size": tp}, "zero_optimization": {"stage": stage}}
    trainer = trainer_of(MixedTrainer, shared() / f"{name}-{tp}-{dp}", dp=dp, config=config, **KINDS[name])
    result = trainer.train()
    predicted = trainer.predict(trainer.eval_dataset)
    alone, _, predictions = read(f"stock-{name}-1")
    evaluated, loss, _ = read(f"stock-{name}-{dp}")
    near = 2e-2 if name == "bf16" else 1e-5
    ours = told(trainer)
    for got, one, several in zip(ours, alone, evaluated, strict=True):
        expected = {**one, **{key: several[key] for key in EVALUATION if key in several}}
        assert sorted(got) == sorted(expected)
        exact = ("num_input_tokens_seen", "epoch", "step", "learning_rate", "eval_samples")
        assert {k: got.get(k) for k in exact} == {k: expected.get(k) for k in exact}
        torch.testing.assert_close(got, expected, rtol=near, atol=near)
    torch.testing.assert_close(predicted.metrics["test_loss"], loss, rtol=near, atol=near)
    expected = torch.tensor(predictions)
    torch.testing.assert_close(torch.tensor(predicted.predictions), expected, rtol=near, atol=10 * near)
    # 16 samples an update, by the clock of the run.
    metrics = result.metrics
    assert abs(metrics["train_samples_per_second"] * metrics["train_runtime"] - 16 * STEPS) < 1


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.engine.module_state_dict().items()}


def reloaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def resumed_in_mid_epoch(tp: int, dp: int, stage: int) -> None:
    """An epoch has three updates: after the fourth, four batches of the second epoch are behind."""
    launched()
    folder = shared() / f"resume-{dist.get_world_size()}-{stage}"
    config = {"tensor_parallel": {"autotp_size": tp}, "zero_optimization": {"stage": stage}}
    common = {"dp": dp, "config": config, "save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    whole = trainer_of(MixedTrainer, folder, start=partial(build, attention_dropout=0.1), **common)
    whole.train()
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-8"]
    again = trainer_of(MixedTrainer, folder, start=partial(build, 1, attention_dropout=0.1), **common)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert told(again)[:-1] == told(whole)[:-1] and again.state.global_step == 8
    for (name, got), expected in zip(weights(again).items(), weights(whole).values(), strict=True):
        assert torch.equal(got, expected), name


def best_is_loaded(tp: int, dp: int, stage: int) -> None:
    launched()
    folder = shared() / f"best-{dist.get_world_size()}-{stage}"
    config = {"tensor_parallel": {"autotp_size": tp}, "zero_optimization": {"stage": stage}}
    more = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_steps": 2,
        "max_steps": 6,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that it is the first one
    }
    trainer = trainer_of(MixedTrainer, folder, dp=dp, config=config, **more)
    trainer.train()
    dist.barrier()
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]
    ids = torch.arange(3, 19).view(2, 8)
    trainer.model.eval()
    with torch.no_grad():
        got = trainer.model(input_ids=ids).logits
        expected = reloaded(folder / "checkpoint-2")(input_ids=ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    trainer.save_model(str(folder / "last"))
    tokens = trainer.model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    whole = reloaded(folder / "last").generate(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert tokens.tolist() == whole.tolist()


class MixedSeq2Seq(TPTrainerMixin, Seq2SeqTrainer): ...


def generated(kind: type[Trainer], folder: Path, config: Any = None) -> Any:
    model = build()
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder), use_cpu=True, per_device_eval_batch_size=2, predict_with_generate=True, report_to=[]
    )
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    given = {} if config is None else {"phalanx_config": config}
    trainer = kind(model=model, args=arguments, data_collator=collate, **given)
    predicted = trainer.predict(samples(5, 2, 1003), max_new_tokens=5, do_sample=False)
    assert abs(predicted.metrics["test_loss"] - 7) < 1
    return [[token for token in row if token >= 0] for row in predicted.predictions.tolist()]


def stock_generates() -> None:
    write("generated", generated(Seq2SeqTrainer, shared() / "stock-generates"))


def predicts_with_generate(tp: int) -> None:
    launched()
    config = {"tensor_parallel": {"autotp_size": tp}}
    got = generated(MixedSeq2Seq, shared() / "generates", config)
    assert got == read("generated")


def refused() -> None:
    """Settings that contradict one another, all at once."""
    launched()
    for config, more, said in [
        ({"bf16": {"enabled": True}}, {}, "bf16.enabled: True, but bf16 says False"),
        ({"gradient_clipping": 2}, {}, "gradient_clipping: 2, but max_grad_norm says 0.5"),
        ({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}}, {}, "train_batch_size: 8"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1}}}, {}, "optimizer.params.lr: 1"),
        ({"tensor_parallel": {"autotp_size": 3}}, {}, "does not divide the 2 ranks"),
        ({}, {"bf16_full_eval": True}, "bf16_full_eval"),
        ({}, {"torch_compile": True}, "torch_compile"),
        ({"unheard_of": 1}, {}, "unheard_of: unknown key"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(said)):
            trainer_of(MixedTrainer, shared() / "refused", config=config, **more)


def tokenizer_by_its_old_name() -> None:
    """`tokenizer=` is `processing_class=`, unless a Trainer has an argument of this name."""

    class Own(Trainer):
        def __init__(self, *args: Any, tokenizer: Any = None, **kwargs: Any) -> None:
            self.own = tokenizer
            super().__init__(*args, **kwargs)

    class MixedOwn(TPTrainerMixin, Own): ...

    tokenizer = tiny_tokenizer()
    arguments = TrainingArguments(output_dir=str(shared() / "names"), use_cpu=True, report_to=[])
    given: dict[str, Any] = {"model": build(), "args": arguments, "tokenizer": tokenizer}
    assert MixedTrainer(**given).processing_class is tokenizer
    mixed = MixedOwn(**given)
    assert mixed.own is tokenizer and mixed.processing_class is None
    with pytest.raises(ConfigError, match="give one of them"):
        MixedTrainer(**given, processing_class=tokenizer)


def config_decides() -> None:
    """The optimizer and the schedule of the config, with what the arguments fill in."""
    launched()
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": "auto",
                "warmup_num_steps": "auto",
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_type": "linear",
            },
        },
    }
    before = json.dumps(config)
    trainer = trainer_of(MixedTrainer, shared() / "config", config=config, eval_strategy="no")
    trainer.train()
    assert json.dumps(config) == before
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    peak = trainer.args.learning_rate
    assert rates[0] == 0 and max(rates) == pytest.approx(peak) and rates[-1] == pytest.approx(peak / 4)
    group = trainer.engine.optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.1, (0.9, 0.999), 1e-8)


def evaluated_trained_and_trained_again(tp: int, dp: int, stage: int) -> None:
    """Evaluation before training cuts the model; training goes on from there, twice."""
    launched()
    config = {"tensor_parallel": {"autotp_size": tp}, "zero_optimization": {"stage": stage}}
    trainer = trainer_of(MixedTrainer, shared() / "again", dp=dp, config=config, eval_strategy="no", max_steps=3)
    before = trainer.evaluate()["eval_loss"]
    assert trainer.engine is None
    first = trainer.train()
    after = trainer.evaluate()["eval_loss"]
    again = trainer.train()
    assert before > after > trainer.evaluate()["eval_loss"] and first.training_loss > again.training_loss
    flops = trainer.state.total_flos
    alone = 6 * trainer.state.log_history[-1]["num_input_tokens_seen"] * build().num_parameters(exclude_embeddings=True)
    assert flops >= alone  # padding counts


def every_case(world: int) -> dict[str, Callable[[], None]]:
    if world == 1:
        found = {f"stock {name}": partial(stock, name) for name in KINDS}
        return {**found, "stock generates": stock_generates, "tokenizer": tokenizer_by_its_old_name}
    grids = {2: [(2, 1, 0), (1, 2, 1)], 4: [(2, 2, 0), (2, 2, 1), (2, 2, 2), (2, 2, 3)]}[world]
    found = {}
    if world == 2:
        found |= {f"stock {name} on two ranks": partial(stock, name) for name in KINDS}
        found |= {"refused": refused, "config decides": config_decides}
        found |= {"predicts with generate": partial(predicts_with_generate, 2)}
        found |= {"trained again": partial(evaluated_trained_and_trained_again, 2, 1, 0)}
    for grid in grids:
        tp, _, stage = grid
        names = ["fp32"] if tp == 1 or (stage in (0, 2) and world == 4) else list(KINDS)
        for name in names:
            found[f"{name} with tp, dp, stage {grid}"] = partial(same_as_stock, name, *grid)
    for grid in {2: [(2, 1, 0)], 4: [(2, 2, 1), (2, 2, 3)]}[world]:
        found[f"resumed with tp, dp, stage {grid}"] = partial(resumed_in_mid_epoch, *grid)
        found[f"best with tp, dp, stage {grid}"] = partial(best_is_loaded, *grid)
    return found


def cases(world: int) -> dict[str, Callable[[], None]]:
    """Those that are quick enough to run each time; `hf_all_cases` has all."""
    names = {
        1: ["stock fp32", "tokenizer"],
        2: [
            "stock fp32 on two ranks",
            "trained again",
            "refused",
            "config decides",
            "resumed with tp, dp, stage (2, 1, 0)",
        ],
        4: ["fp32 with tp, dp, stage (2, 2, 3)"],
    }
    found = every_case(world)
    return {name: found[name] for name in names[world]}
