"""Rules are proven before they cut a model: a small one of its architecture is cut by them, over ranks that are
threads, and must give the outputs and gradients of the uncut one.

A fused weight that is cut by a layout which is not its own raises nothing; it computes another function. This is where
that is found.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.distributed.group import Group, GroupError
from phalanx.distributed.thread_group import run_threads
from phalanx.layout import merge
from phalanx.layout.decide import Decision
from phalanx.layout.fused import Order, qkv_cut
from phalanx.layout.rules import PartitionConfig, RuleError
from phalanx.parallel.inventory import attention_path, inventory
from phalanx.parallel.parallelize import cut_model, decisions_for
from phalanx.parallel.registry import LayoutRegistry
from phalanx.parallel.small_model import SmallModel, small_model

_TOLERANCE = 1e-4
_LENGTH = 7
_ORDERS: Mapping[Order, str] = {
    "grouped": "each head's (or KV group's) q, k and v side by side",
    "stacked": "all of Q, then all of K, then all of V",
}


class VerificationError(ValueError):
    """Rules under which a model computes another function. The message names the layer and the layout that fits."""


class VerificationWarning(UserWarning):
    """The same, reported and gone on with as asked; or rules that could not be tried."""


@dataclass(frozen=True)
class Verdict:
    """What came of a trial. `fault` is empty where the cut model equals the whole one; `tried` says whether it ran."""

    fault: str = ""
    tried: bool = True


def verify_rules(
    model: nn.Module,
    group: Group,
    *,
    config: PartitionConfig | Mapping[str, Any] | None,
    preset: str | None,
    sequence_parallel: bool,
    action: str,
) -> None:
    """Try the rules for `model` over `group.size` ranks; rank 0 tries, all ranks get its verdict.

    Raises:
        VerificationError: they compute another function, and `action` is "error". With "warn" rank 0 warns.
    """
    payload = None
    if group.rank == 0:
        found = trial(model, group.size, config=config, preset=preset, sequence_parallel=sequence_parallel)
        payload = json.dumps([found.fault, found.tried]).encode()
    fault, tried = json.loads(group.broadcast_bytes(payload))
    if fault and tried and action == "error":
        raise VerificationError(fault)
    if fault and group.rank == 0:
        warnings.warn(fault, VerificationWarning, stacklevel=3)


def trial(
    model: nn.Module,
    world: int,
    *,
    config: PartitionConfig | Mapping[str, Any] | None = None,
    preset: str | None = None,
    sequence_parallel: bool = False,
) -> Verdict:
    """Whether the rules keep the function of a small random model of `model`'s architecture.

    Only the model's class and config are looked at. The caller's random state is not touched.
    """
    if config is not None and not isinstance(config, PartitionConfig):
        config = PartitionConfig.from_dict(config)
    for exact in (False, True):
        small = small_model(model, exact=exact)
        if small is None:
            continue
        rules = small.rescaled(config, [weight.name for weight in inventory(small.model)])
        try:
            decisions = decisions_for(small.model, world, config=rules, preset=preset)
        except (RuleError, ValueError):
            continue  # sizes that cannot be rescaled: a layer of true width can
        return _Trial(small, world, decisions, sequence_parallel).verdict()
    return Verdict(
        "the partition rules were not verified: no small model of this class could be built from its config. "
        "Compare a step at tensor-parallel size 1 with one that is cut, or set verify to 'off'",
        tried=False,
    )


class _Trial:
    def __init__(
        self, small: SmallModel, world: int, decisions: Mapping[str, Decision], sequence_parallel: bool
    ) -> None:
        self.small = small
        self.world = world
        self.decisions = decisions
        self.sequence_parallel = sequence_parallel
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.ids = torch.randint(0, small.vocab_size, (2, _LENGTH))
        self.reference = _run(copy.deepcopy(small.model), self.ids)

    def verdict(self) -> Verdict:
        difference = self._difference(self.decisions)
        if not difference:
            return Verdict()
        return Verdict(f"{difference}{self._advice(difference)}")

    def _difference(self, decisions: Mapping[str, Decision]) -> str:
        """Where a model that is cut by `decisions` departs from the whole one; empty if nowhere."""
        models = [copy.deepcopy(self.small.model) for _ in range(self.world)]

        def rank(group: Group) -> tuple[_Record, LayoutRegistry]:
            model = models[group.rank]
            registry = cut_model(model, group, decisions, sequence_parallel=self.sequence_parallel)
            return _run(model, self.ids), registry

        try:
            ranks = run_threads(self.world, rank)
        except (RuntimeError, ValueError, IndexError, TypeError, GroupError) as error:
            first_line = str(error).partition("\n")[0]
            return f"the partition rules break the model's forward: {type(error).__name__}: {first_line}"
        if not self.sequence_parallel:
            for path in self.reference.outputs:
                if _differs(self.reference.outputs[path], ranks[0][0].outputs.get(path)):
                    return f"cut over {self.world} ranks by these rules, {path} computes another function"
        if _differs(self.reference.loss, ranks[0][0].loss):
            return f"cut over {self.world} ranks by these rules, the model has another loss"
        registry = ranks[0][1]
        for name, whole in self.reference.gradients.items():
            parts = [record.gradients[name] for record, _ in ranks]
            layout = registry[name]
            joined = parts[0] if layout.partition.kind == "replicate" else merge(parts, layout.partition, layout.shape)
            if _differs(whole, joined) or (layout.partition.kind == "replicate" and _differs(parts[0], parts[-1])):
                return f"cut over {self.world} ranks by these rules, {name} gets another gradient"
        return ""

    def _advice(self, difference: str) -> str:
        """The weights in question, how the rules cut them, and another layout under which all is right."""
        fused = {
            weight.name: weight
            for weight in inventory(self.small.model)
            if weight.attention is not None
            and weight.name in self.decisions
            and self.decisions[weight.name].style == "column"
            and _is_fused_qkv(weight.out_features, weight.attention)
        }
        if not fused:
            return (
                ". Compare the rules with how the model's forward reads these weights, or leave the weights out of them"
            )
        first = next(iter(fused))
        declared = self.decisions[first]
        text = f". Its fused weight {first} is cut as {declared.source} says"
        for order, meaning in _ORDERS.items():
            try:
                other = {
                    name: replace(declared, weight=cut, bias=_bias_like(declared, cut))
                    for name, weight in fused.items()
                    for cut in [qkv_cut(weight, order)]
                }
            except ValueError:
                continue
            if not self._difference({**self.decisions, **other}):
                shape = fused[first].attention
                heads = f"{shape.num_heads} query and {shape.num_kv_heads} KV heads" if shape else "its heads"
                return (
                    f"{text}, but it is laid out as {meaning} ({heads}). Leave out `shape`, so that the layout known "
                    "for this model type is taken, or declare it"
                )
        return text + "; no layout that is known for fused projections fits either"


def _bias_like(decision: Decision, cut: Any) -> Any:
    return None if decision.bias is None else replace(cut, dim=0)


def _is_fused_qkv(out_features: int, shape: Any) -> bool:
    both_kv = shape.num_kv_heads * (shape.head_dim + shape.value_dim)
    return bool(out_features == shape.num_heads * shape.head_dim + both_kv)


@dataclass
class _Record:
    loss: Tensor
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def _run(model: nn.Module, ids: Tensor) -> _Record:
    """One forward and backward, with the outputs of every attention block and MLP by name."""
    outputs: dict[str, Tensor] = {}
    hooks = []
    for path, module in model.named_modules():
        block = attention_path(path) == path or path.rpartition(".")[2] in ("mlp", "feed_forward", "ffn")
        inside = block and ".experts." not in path
        if inside:
            hooks.append(module.register_forward_hook(_keep(outputs, path)))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    for hook in hooks:
        hook.remove()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    return _Record(loss.detach(), outputs, gradients)


def _keep(outputs: dict[str, Tensor], path: str) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            outputs[path] = first.detach()

    return hook


def _differs(whole: Tensor, cut: Tensor | None) -> bool:
    if cut is None or whole.shape != cut.shape:
        return True
    scale = whole.norm()
    return not bool((whole - cut).norm() <= _TOLERANCE * scale + 1e-9)
