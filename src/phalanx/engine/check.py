"""Compares a served model with transformers' own, layer by layer: where does it first differ, and by how much?

What each attention and each MLP gives, the stream after each layer, and the logits are looked at, for a sequence given
at once, in pieces, and token by token, at each tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.distributed.group import Group
from phalanx.distributed.thread_group import run_threads
from phalanx.engine.build import build_engine
from phalanx.models.hf_config import HFConfig, ModelConfigError
from phalanx.models.late_sums import set_late_sums
from phalanx.parallel.inventory import attention_path
from phalanx.parallel.small_model import shrunk_config

PIECES: dict[str, Callable[[int], list[int]]] = {
    "one shot": lambda length: [length],
    "in pieces": lambda length: [7] * (length // 7) + ([length % 7] if length % 7 else []),
    "token by token": lambda length: [1] * length,
}
TOLERANCE = 1e-4
_MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe")

Points = dict[str, Tensor]
"""Name of a point -> [tokens, width] of it, in the order of the forward."""


@dataclass(frozen=True)
class Difference:
    """How far a served model is from the reference at one point.

    relative: the norm of the difference over that of the reference. token: the first row that is off by more than the
    tolerance, None if none is.
    """

    point: str
    relative: float
    token: int | None


@dataclass(frozen=True)
class Comparison:
    """One way of serving compared with the reference; `first` is where it departs from it, None if nowhere."""

    tp: int
    given: str
    points: list[Difference]
    first: Difference | None


def check_model(
    reference: nn.Module,
    source: Any,
    ids: Sequence[int],
    *,
    tp_sizes: Sequence[int] = (1, 2),
    hf_config: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Comparison]:
    """Compare the engine's model of `source` with `reference`, a causal LM of transformers with the same weights.

    Args:
        source: what `build_engine` takes.
        ids: one sequence of token ids.
        tp_sizes: each is run by ranks that are threads.
        progress: told what is being run.

    Raises:
        ModelConfigError, WeightError: the model cannot be served at all.
    """
    expected = reference_points(reference, ids)
    found = []
    for tp in tp_sizes:
        for given, pieces in PIECES.items():
            progress(f"tensor-parallel size {tp}, {given}")
            served = served_points(source, ids, pieces(len(ids)), tp, hf_config)
            found.append(_compare(tp, given, expected, served))
    return found


def reference_points(model: Any, ids: Sequence[int]) -> Points:
    """The points of transformers' model, in its own dtype."""
    points: Points = {}
    hooks = []

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor):
                points[name] = first.detach().reshape(-1, first.shape[-1]).float()

        return hook

    layers = decoder_layers(model)
    for index, layer in enumerate(layers):
        for path, module in layer.named_modules():
            name = path.rpartition(".")[2]
            if path and attention_path(path) == path and attention_path(path.rpartition(".")[0]) is None:
                hooks.append(module.register_forward_hook(keep(f"layer {index}: attention")))
            elif name in _MLP_NAMES and path.rpartition(".")[0] in ("", "norm_attn_norm"):
                hooks.append(module.register_forward_hook(keep(f"layer {index}: mlp")))
        hooks.append(layer.register_forward_hook(keep(f"layer {index}: output")))
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    for each in hooks:
        each.remove()
    points["logits"] = logits.float()
    return points


def served_points(
    source: Any, ids: Sequence[int], pieces: Sequence[int], tp: int, hf_config: dict[str, Any] | None = None
) -> Points:
    """The points of the engine's model on rank 0 of `tp`, the sequence given in pieces of these lengths."""
    settings = {
        "dtype": "float32",
        "device": "cpu",
        "block_size": 4,
        "num_blocks": 4 + 2 * (len(ids) // 4 + 2) * 8,
        "max_num_seqs": 2,
        "max_num_batched_tokens": max(len(ids), 8),
        "max_model_len": len(ids) + 1,
        "prefix_cache": False,
    }

    def rank(group: Group) -> Points:
        with build_engine(source, settings, hf_config=hf_config, group=group, tensor_parallel_size=tp) as engine:
            points: dict[str, list[Tensor]] = {}
            _watch(engine.runner.model, points)
            start = 0
            logits = []
            for length in pieces:
                logits.append(engine.put([1], [list(ids[start : start + length])], logits="all"))
                start += length
            joined = {name: torch.cat(parts) for name, parts in points.items()}
            return {**joined, "logits": torch.cat(logits)}

    return run_threads(tp, rank)[0]


def _watch(model: Any, points: dict[str, list[Tensor]]) -> None:
    """Let the steps of this model's forward note what they give, whole on every rank."""
    set_late_sums(model, False)

    def note(name: str, value: Tensor) -> None:
        points.setdefault(name, []).append(value.detach().float().clone())

    layer_step, attention_step, mlp_step = model.forward_layer, model.forward_attention, model.forward_mlp

    def forward_attention(layer: int, *args: Any, **kwargs: Any) -> Any:
        out = attention_step(layer, *args, **kwargs)
        note(f"layer {layer}: attention", out)
        return out

    def forward_mlp(layer: int, *args: Any, **kwargs: Any) -> Any:
        out = mlp_step(layer, *args, **kwargs)
        note(f"layer {layer}: mlp", out)
        return out

    def forward_layer(layer: int, *args: Any, **kwargs: Any) -> Any:
        hidden, residual = layer_step(layer, *args, **kwargs)
        note(f"layer {layer}: output", hidden if residual is None else hidden + residual)
        return hidden, residual

    model.forward_layer, model.forward_attention, model.forward_mlp = forward_layer, forward_attention, forward_mlp


def _compare(tp: int, given: str, expected: Points, served: Points) -> Comparison:
    points = [
        _difference(name, right, served[name])
        for name, right in expected.items()
        if name in served and served[name].shape == right.shape
    ]
    first = next((each for each in points if each.token is not None), None)
    return Comparison(tp, given, points, first)


def _difference(name: str, right: Tensor, mine: Tensor) -> Difference:
    off = (mine - right).norm(dim=-1) > TOLERANCE * right.norm(dim=-1).clamp_min(right.norm() / len(right) ** 0.5)
    off |= mine.isnan().any(-1)
    relative = float((mine - right).norm() / right.norm().clamp_min(1e-30))
    return Difference(name, relative, int(off.nonzero()[0]) if bool(off.any()) else None)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of a model's layers that attend."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) and _attends(module[0]):
            return module
    raise ModelConfigError(f"{type(model).__name__} has no list of layers that attend: it cannot be compared")


def _attends(layer: nn.Module) -> bool:
    return any(attention_path(path) is not None for path, _ in layer.named_modules())


def random_reference(config: HFConfig, *, exact: bool = False, seed: int = 0) -> Any:
    """A random causal LM of transformers in fp32 with this config, or a smaller one of the same kind.

    Its weights are large enough for every one of them to matter: biases are not zero, norms not one.

    Raises:
        ModelConfigError: transformers cannot build it.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    try:
        settings: Any = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config.given))
        if not exact:
            settings = shrunk_config(settings, window=5)
        auto: Any = AutoModelForCausalLM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = auto.from_config(settings, dtype=torch.float32, attn_implementation="eager").eval()
            for parameter in model.parameters():
                with torch.no_grad():
                    if parameter.dim() == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.2)
                    else:
                        parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise ModelConfigError(
            f"transformers cannot build a causal LM of model_type {config['model_type']!r} to compare with: {error}"
        ) from error
    return model
