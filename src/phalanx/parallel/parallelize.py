"""A model becomes tensor-parallel in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from phalanx.distributed.group import Group
from phalanx.distributed.mesh import Mesh
from phalanx.layout.decide import Decision, decide
from phalanx.layout.rules import PartitionConfig
from phalanx.parallel.adapters import StillThere, base_model, check_adapters, follow, whole_padding
from phalanx.parallel.cut import Cutter, check_same_weights
from phalanx.parallel.head import VocabHead, owner_of_head
from phalanx.parallel.inventory import inventory, model_type, tied_names
from phalanx.parallel.layers import ColumnLinear, CutLayer
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
    overlap: bool = False,
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
        overlap: in each backward, compute gradients of weights while those of inputs are summed over the ranks; such a
            backward cannot be differentiated again.
        sum_gradients: in each backward, sum the gradients of parameters that act inside a region over the ranks.
            Without it the caller does so, for the parameters that the registry calls partial.

    Raises:
        RuleError: rules that do not fit the model, all of their faults at once.
        VerificationError: rules that compute another function.
        ValueError: what cannot be cut, or ranks that hold different models.
    """
    group = mesh.tp
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("the model is wrapped in DistributedDataParallel: pass the module inside of it")
    if any(isinstance(module, CutLayer) for module in model.modules()):
        raise ValueError("this model is cut already: a model is cut once, build a new one for other ranks")
    if group.size == 1:
        registry = LayoutRegistry.whole(model)
        load_pending(model, registry, mesh.device)
        return registry
    decisions = decisions_for(model, group.size, config=config, preset=preset)
    chosen = verify or ("error" if any(decision.hand_written for decision in decisions.values()) else "off")
    if chosen != "off":
        from phalanx.parallel.verify import verify_rules

        verify_rules(
            base_model(model), group, config=config, preset=preset, sequence_parallel=sequence_parallel, action=chosen
        )
    check_same_weights(model, group, mesh.device)
    registry = cut_model(
        model,
        group,
        decisions,
        sequence_parallel=sequence_parallel,
        gather_logits=gather_logits,
        overlap=overlap,
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
    decisions = decide(
        inventory(model),
        model_type=model_type(model),
        config=config,
        preset=preset,
        tp_plan=tp_plan(model),
        tied=tied_names(model),
        world=world,
    )
    return follow(decisions)


def cut_model(
    model: nn.Module,
    group: Group,
    decisions: Mapping[str, Decision],
    *,
    sequence_parallel: bool = False,
    gather_logits: bool = False,
    overlap: bool = False,
    sum_gradients: bool = True,
) -> LayoutRegistry:
    """Carry `decisions` out on `model`, in place."""
    if sequence_parallel:
        _refuse_under_sequence_parallelism(model)
    check_adapters(model, decisions)
    whole_padding(model)
    model.register_forward_pre_hook(_PartialOutputs(sequence_parallel), with_kwargs=True)
    for whole in {model, base_model(model)}:
        if hasattr(whole, "save_pretrained"):
            whole.save_pretrained = _no_whole_weights
    registry = Cutter(model, group, decisions, sequence_parallel=sequence_parallel, overlap=overlap).cut()
    heads: dict[int, tuple[nn.Module, list[ColumnLinear]]] = {}
    for name, decision in decisions.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if decision.style == "vocab" and isinstance(module, ColumnLinear):
            module.cut.gather = True
            if (owner := owner_of_head(base_model(model), module)) is not None:
                heads.setdefault(id(owner), (owner, []))[1].append(module)
    for owner, layers in heads.values():
        VocabHead(layers, owner, gather_logits)
    base_model(model).register_forward_pre_hook(StillThere(model))
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


class _PartialOutputs:
    """Refuses outputs of which a rank of a cut model holds a part only."""

    def __init__(self, sequence_parallel: bool) -> None:
        self.names = ("output_attentions", *(("output_hidden_states",) if sequence_parallel else ()))

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        config: Any = getattr(model, "config", None)
        for name in self.names:
            if kwargs.get(name) or getattr(config, name, False):
                part = "heads" if name == "output_attentions" else "tokens"
                raise ValueError(f"{name}=True: a rank of this cut model has some of the {part} only. Leave it out")


def _no_whole_weights(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("this model is cut: save_pretrained would write one rank's shards as if they were the model")


def _refuse_under_sequence_parallelism(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    for name in ("output_router_logits", "output_hidden_states"):
        if getattr(config, name, False):
            raise ValueError(
                f"{name}=True with sequence parallelism: each rank sees only its tokens there. Switch one of them off"
            )
