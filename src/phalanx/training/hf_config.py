"""What a Trainer's arguments say of a training config: they fill it in, or are held against it.

The rules are those of transformers for its DeepSpeed configs: a value of `"auto"` is taken from TrainingArguments, and
one that stands there must be the same. Here, a value that is left out counts as `"auto"` where the arguments know it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from phalanx.config import ConfigError
from phalanx.training.config_text import load_config

# Key of the config -> (what the arguments say, which of them say it).
_ALWAYS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "train_micro_batch_size_per_gpu": (lambda a: a.per_device_train_batch_size, "per_device_train_batch_size"),
    "gradient_accumulation_steps": (lambda a: a.gradient_accumulation_steps, "gradient_accumulation_steps"),
    "gradient_clipping": (lambda a: float(a.max_grad_norm or 0.0), "max_grad_norm"),
    "bf16.enabled": (lambda a: bool(a.bf16), "bf16"),
    "fp16.enabled": (lambda a: bool(a.fp16), "fp16"),
}
_IF_THERE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "optimizer.params.lr": (lambda a: a.learning_rate, "learning_rate"),
    "optimizer.params.betas": (lambda a: [a.adam_beta1, a.adam_beta2], "adam_beta1, adam_beta2"),
    "optimizer.params.eps": (lambda a: a.adam_epsilon, "adam_epsilon"),
    "optimizer.params.weight_decay": (lambda a: a.weight_decay, "weight_decay"),
    "scheduler.params.warmup_max_lr": (lambda a: a.learning_rate, "learning_rate"),
}
_SPELLED = {"bfloat16": "bf16"}


def filled(config: Mapping[str, Any] | str | os.PathLike[str], args: Any, *, world_size: int) -> dict[str, Any]:
    """The config with what TrainingArguments `args` say, but for the length of the run; `config` is not changed.

    Args:
        config: a DeepSpeed config, as a dict, the path of a JSON file, or base64; `{}` says nothing.
        world_size: ranks; `tensor_parallel.autotp_size` of them share one batch.

    Raises ConfigError that names every value that is not the arguments'.
    """
    given = {_SPELLED.get(key, key): value for key, value in load_config(config).items()}
    problems: list[str] = []
    for key, (value, name) in _ALWAYS.items():
        _fill(given, key, value(args), name, problems, make=True)
    for key, (value, name) in _IF_THERE.items():
        _fill(given, key, value(args), name, problems)
    _fill(given, "scheduler.params.warmup_min_lr", 0, "", problems, check=False)
    tp_size = tp_size_of(given)
    if world_size % tp_size == 0:
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * (world_size // tp_size)
        said = (
            f"per_device_train_batch_size x gradient_accumulation_steps x {world_size // tp_size} copies of the model"
        )
        _fill(given, "train_batch_size", batch, said, problems)
    if problems:
        raise ConfigError("the training config and TrainingArguments differ:\n" + "\n".join(problems))
    return given


def fill_length(config: dict[str, Any], args: Any, steps: int) -> None:
    """Fill in what depends on the length of the run, which is `steps` updates. Raises ConfigError as `filled`."""
    problems: list[str] = []
    _fill(config, "scheduler.params.total_num_steps", steps, "num_train_epochs, max_steps", problems)
    _fill(config, "scheduler.params.warmup_num_steps", max(1, args.get_warmup_steps(steps)), "warmup_steps", problems)
    if problems:
        raise ConfigError("the training config and TrainingArguments differ:\n" + "\n".join(problems))


def check_arguments(args: Any, tp_size: int) -> None:
    """Raises ConfigError for TrainingArguments that would have no effect, or another than they have elsewhere."""
    refused = {
        "deepspeed": (args.deepspeed, f"{_installed_deepspeed()}; phalanx_config takes the same file, give it to that"),
        "fsdp": (args.fsdp, "use ZeRO stage 3 in phalanx_config"),
        "parallelism_config": (args.parallelism_config is not None, "phalanx_config says how ranks are used"),
        "torch_compile": (args.torch_compile, "compile blocks of the model before, each by block.compile()"),
        "auto_find_batch_size": (args.auto_find_batch_size, "give the batch size"),
        "bf16_full_eval": (args.bf16_full_eval and not args.bf16, "a model is evaluated as it is trained: use bf16"),
        "fp16_full_eval": (args.fp16_full_eval and not args.fp16, "a model is evaluated as it is trained: use fp16"),
        "save_only_model": (
            args.save_only_model and args.load_best_model_at_end,
            "load_best_model_at_end loads a whole checkpoint; use one of the two",
        ),
        "train_sampling_strategy": (
            getattr(args, "train_sampling_strategy", "") == "batch_rebalance" and args.world_size > 1,
            '"batch_rebalance" counts ranks, not copies of the model; use another',
        ),
        "accelerator_config.dispatch_batches": (
            bool(args.accelerator_config.dispatch_batches) and args.world_size > 1,
            "rank 0 would cut a batch over all ranks, those of one copy among them; leave it out",
        ),
        "n_gpu": (args.n_gpu > 1, "start one process a GPU: phalanx launch, or torchrun"),
    }
    problems = [f"  {name}: {note}" for name, (asked, note) in refused.items() if asked]
    if problems:
        raise ConfigError("these TrainingArguments cannot be followed here:\n" + "\n".join(problems))
    if args.world_size % tp_size:
        raise ConfigError(
            f"tensor_parallel.autotp_size={tp_size} does not divide the {args.world_size} ranks of this run: start a "
            f"multiple of {tp_size}"
        )


def _installed_deepspeed() -> str:
    """Who would train with `TrainingArguments(deepspeed=...)`."""
    try:
        version = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return "no package of that name is installed"
    if "+phalanx" in version:
        return "that is for a Trainer without the mixin"
    return f"DeepSpeed {version} is installed and would train the model itself"


def tp_size_of(config: Mapping[str, Any]) -> int:
    """Ranks that share one copy of the model, as far as the config says so."""
    block = config.get("tensor_parallel")
    size = block.get("autotp_size", 1) if isinstance(block, Mapping) else 1
    return max(1, size) if isinstance(size, int) and not isinstance(size, bool) else 1


def _fill(
    config: dict[str, Any],
    key: str,
    value: Any,
    name: str,
    problems: list[str],
    *,
    make: bool = False,
    check: bool = True,
) -> None:
    """Set `key` (a dotted path) to `value` where it is "auto" (or, with `make`, not there), else hold them together."""
    *blocks, leaf = key.split(".")
    at: Any = config
    for block in blocks:
        if block not in at and make:
            at[block] = {}
        at = at.get(block)
        if not isinstance(at, dict):
            return
    if at.get(leaf) == "auto" or (make and leaf not in at):
        at[leaf] = value
    elif check and leaf in at and at[leaf] is not None and at[leaf] != value:
        problems.append(f'  {key}: {at[leaf]!r}, but {name} says {value!r}; correct one, or write "auto"')
