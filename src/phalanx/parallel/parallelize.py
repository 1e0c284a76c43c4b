"""A model becomes tensor-parallel in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from phalanx.distributed.group import Group
from phalanx.distributed.mesh import Mesh
from phalanx.layout.decide import Decision, decide
from phalanx.layout.rules import PartitionConfig
from phalanx.parallel.cut import Cutter, check_same_weights
from phalanx.parallel.head import VocabHead, owner_of_head
from phalanx.parallel.inventory import inventory, model_type, tied_names
from phalanx.parallel.layers import ColumnLinear
from phalanx.parallel.loading import load_pending
from phalanx.parallel.registry import LayoutRegistry

Verify = Literal["error", "warn", "off"]


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    config: PartitionConfig | Mapping[str, Any] | None = None,
    preset: str | None = None,
    verify: Verify | None = None,
    sequence_parallel: bool = False,
    gather_logits: bool = False,
    sum_gradients: bool = True,
) -> LayoutRegistry:
    """Cut `model` over the ranks of `mesh.tp`, in place, and return how each of its parameters lies now.

    Every rank passes the same whole model, or one of `from_pretrained`, whose values are read now. Parameters stay
    the same objects and become this rank's shards, so that an optimizer built before keeps working. Modules stay
    instances of their classes.

    Args:
        config: the user's rules; without them and without `preset`, those of the model's type, its `tp_plan`, or its
            structure.
        preset: the name of a built-in set of rules.
        verify: prove the rules on a small random model of the same architecture first. "error" refuses wrong ones,
            "warn" reports them and goes on, "off" trusts them. Default: "error" where the user wrote rules, else "off".
        sequence_parallel: cut the tokens between the regions over the ranks as well.
        gather_logits: join the logits although a loss is computed from the ranks' shares.
        sum_gradients: in each backward, sum the gradients of parameters that act inside a region over the ranks.
            Without it the caller does so, for the parameters that the registry calls partial.

    Raises:
        RuleError: rules that do not fit the model, all of their faults at once.
        VerificationError: rules that compute another function.
        ValueError: what cannot be cut, or ranks that hold different models.
    """
    group = mesh.tp
    if group.size == 1:
        registry = LayoutRegistry.whole(model)
        load_pending(model, registry, mesh.device)
        return registry
    decisions = decisions_for(model, group.size, config=config, preset=preset)
    chosen = verify or ("error" if any(decision.hand_written for decision in decisions.values()) else "off")
    if chosen != "off":
        from phalanx.parallel.verify import verify_rules

        verify_rules(model, group, config=config, preset=preset, sequence_parallel=sequence_parallel, action=chosen)
    check_same_weights(model, group, mesh.device)
    registry = cut_model(
        model,
        group,
        decisions,
        sequence_parallel=sequence_parallel,
        gather_logits=gather_logits,
        sum_gradients=sum_gradients,
    )
    load_pending(model, registry, mesh.device)
    return registry


def decisions_for(
    model: nn.Module,
    world: int,
    *,
    config: PartitionConfig | Mapping[str, Any] | None = None,
    preset: str | None = None,
) -> dict[str, Decision]:
    """What the rules say of every weight of `model`, over `world` ranks."""
    if config is not None and not isinstance(config, PartitionConfig):
        config = PartitionConfig.from_dict(config)
    return decide(
        inventory(model),
        model_type=model_type(model),
        config=config,
        preset=preset,
        tp_plan=tp_plan(model),
        tied=tied_names(model),
        world=world,
    )


def cut_model(
    model: nn.Module,
    group: Group,
    decisions: Mapping[str, Decision],
    *,
    sequence_parallel: bool = False,
    gather_logits: bool = False,
    sum_gradients: bool = True,
) -> LayoutRegistry:
    """Carry `decisions` out on `model`, in place."""
    if sequence_parallel:
        _refuse_under_sequence_parallelism(model)
    registry = Cutter(model, group, decisions, sequence_parallel=sequence_parallel).cut()
    for name, decision in decisions.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if decision.style == "vocab" and isinstance(module, ColumnLinear):
            module.cut.gather = True
            if (owner := owner_of_head(model, module)) is not None:
                VocabHead(module, owner, gather_logits)
    if sum_gradients:
        for name, parameter in model.named_parameters():
            if registry[name].partial and parameter.requires_grad:
                parameter.register_hook(group.all_reduce)
    return registry


def tp_plan(model: nn.Module) -> dict[str, str]:
    """The `tp_plan` that a transformers model brings: its config's for the base model, and those of its classes."""
    merged: dict[str, str] = {}
    for module in model.modules():
        plan = getattr(module, "_tp_plan", None)
        if isinstance(plan, Mapping):
            merged.update(plan)
        base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        if isinstance(base, Mapping):
            merged.update(base)
    return merged


def _refuse_under_sequence_parallelism(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    for name in ("output_router_logits", "output_hidden_states"):
        if getattr(config, name, False):
            raise ValueError(
                f"{name}=True with sequence parallelism: each rank sees only its tokens there. Switch one of them off"
            )
