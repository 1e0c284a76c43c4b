"""One weight and the rule for it -> its Decision. Raises ValueError for a cut that would compute another function."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.layout.decision import Decision, Rule, Style
from phalanx.layout.fused import QKV_ORDERS, attention_cut, is_gated, qkv_cut
from phalanx.layout.partition import Partition
from phalanx.layout.roles import Role, Skeleton, container
from phalanx.layout.shapes import declared_cut
from phalanx.layout.weight import Weight

_WHOLE_INPUT: Mapping[Role, str] = {
    **dict.fromkeys(("query", "key", "value", "qkv", "latent"), "it projects hidden states into attention"),
    **dict.fromkeys(("up", "gate_up"), "it projects hidden states into the MLP"),
    "expand": "it expands a latent that every rank holds",
    "head": "it projects hidden states to the vocabulary",
}  # fmt: skip


def cut(weight: Weight, rule: Rule, model: Skeleton) -> Decision:
    """What `rule` means for `weight`, one of those of `model`."""
    role = model.roles[weight.name]
    if rule.style == "skip":
        return Decision(
            "skip",
            Partition.replicate(),
            Partition.replicate() if weight.has_bias else None,
            sum_gradient=rule.sum_gradient,
            source=rule.source,
            hand_written=rule.hand_written,
        )
    if weight.kind == "embedding" or role == "head" or rule.style == "vocab":
        return _vocab(weight, rule, role)
    if weight.kind in ("norm", "other"):
        raise ValueError("it is no weight of a projection, and can only be named by 'skip'")
    if rule.style == "row":
        return _row(weight, rule, role, model)
    return _column(weight, rule, role, model)


def _vocab(weight: Weight, rule: Rule, role: Role) -> Decision:
    if weight.kind == "embedding" and rule.style != "vocab":
        raise ValueError(
            f"it is an embedding [rows, hidden], and {rule.style!r} would cut its hidden size, which every later layer "
            "needs whole: use partition_type 'vocab' to cut its rows, or 'skip'"
        )
    if rule.style == "row":
        raise ValueError(f"'row' needs an input that is cut over the ranks, but {_WHOLE_INPUT['head']}: use 'column'")
    if weight.kind not in ("embedding", "linear") or role not in ("tokens", "head", "other"):
        raise ValueError("'vocab' cuts an embedding or an output head, which it is not")
    if rule.spec is not None and (rule.spec.shape is not None or rule.spec.view is not None):
        raise ValueError("an output head is cut by its vocabulary: give neither 'shape' nor 'view'")
    return Decision(
        "vocab",
        Partition.vocab(),
        Partition.vocab() if weight.has_bias else None,
        gather_output=weight.kind == "linear",
        source=rule.source,
        hand_written=rule.hand_written,
    )


def _row(weight: Weight, rule: Rule, role: Role, model: Skeleton) -> Decision:
    if role in _WHOLE_INPUT:
        raise ValueError(
            f"'row' needs an input that is cut over the ranks, but {_WHOLE_INPUT[role]}, which every rank has whole: "
            "use 'column'"
            + (" (heads need not divide: they are dealt whole, KV heads are copied)" if weight.attention else "")
        )
    declared = rule.spec is not None and rule.spec.shape is not None
    rows = _experts_in_rows(weight, model)
    if rows is not None:
        return _decision("experts", Partition.row(view=rows, axis=1, dim=0), weight, rule)
    if weight.kind == "experts" and _stored_transposed(weight, rule, model):
        return _decision("experts", Partition.row(dim=1), weight, rule)
    if declared and rule.spec is not None:
        partition = declared_cut(weight, rule.spec)
    elif role == "out" and weight.attention is not None:
        partition = attention_cut(weight, role)
    else:
        partition = Partition.row(dim=weight.in_dim)
    return _decision("experts" if weight.kind == "experts" else "row", partition, weight, rule)


def _column(weight: Weight, rule: Rule, role: Role, model: Skeleton) -> Decision:
    if role in ("out", "down") and weight.kind != "experts" and not rule.gather_output:
        raise ValueError(
            "'column' leaves each rank a part of the output, but hidden states must be whole: use 'row', or set "
            "'gather_output'"
        )
    if weight.kind == "experts" or (role == "up" and _experts_in_rows(weight, model)):
        return _experts(weight, rule, role, model)
    spec = rule.spec
    if spec is not None and (spec.shape is not None or spec.view is not None):
        return _decision("column", declared_cut(weight, spec), weight, rule)
    if rule.transposed:
        raise ValueError("a packed_rowwise plan is known for experts in one tensor only")
    source = rule.source
    if rule.gather_output:
        partition = Partition.column(dim=weight.out_dim)
    elif role == "qkv":
        order = QKV_ORDERS.get(rule.family or "")
        if order is not None:
            partition = qkv_cut(weight, order)
            source = f"{rule.source}; QKV is laid out as in {rule.family}"
        else:
            partition = _contiguous(weight)
    elif is_gated(weight, rule.family):
        partition = Partition.column(view=(2, _half(weight.out_features)), axis=1, dim=weight.out_dim)
        source = f"{rule.source}; [gate; up]"
    elif role in ("query", "key", "value", "expand") and weight.attention is not None:
        partition = attention_cut(weight, role)
    elif role == "latent":
        raise ValueError("it gives a latent that every head reads: use 'skip'")
    else:
        partition = Partition.column(dim=weight.out_dim)
    return _decision("column", partition, weight, rule, source)


def _contiguous(weight: Weight) -> Partition:
    """A fused projection of unknown layout, of which the rule says that a cut into runs is right."""
    heads = weight.attention
    if heads is None or weight.out_features % heads.num_kv_heads:
        return Partition.column(dim=weight.out_dim)
    return Partition.column(unit=weight.out_features // heads.num_kv_heads, dim=weight.out_dim)


def _experts(weight: Weight, rule: Rule, role: Role, model: Skeleton) -> Decision:
    if rule.gather_output:
        raise ValueError("the outputs of experts are not gathered: drop 'gather_output'")
    rows = _experts_in_rows(weight, model)
    if rows:
        return _decision("experts", Partition.column(view=rows, axis=1, dim=0), weight, rule)
    if rule.spec is not None and (rule.spec.shape is not None or rule.spec.view is not None):
        return _decision("experts", declared_cut(weight, rule.spec), weight, rule)
    transposed = _stored_transposed(weight, rule, model)
    if role == "down":
        if not transposed:
            raise ValueError("'column' would cut the output of experts, which is added up over them: use 'row'")
        return _decision("experts", Partition.row(dim=1), weight, rule)
    dim = 2 if transposed else 1
    if role == "gate_up":
        partition = Partition.column(view=(2, _half(weight.shape[dim])), axis=1, dim=dim)
        return _decision("experts", partition, weight, rule, f"{rule.source}; [gate; up]")
    if role != "up":
        raise ValueError("it is no known tensor of experts: say how it is laid out by 'shape'")
    return _decision("experts", Partition.column(dim=dim), weight, rule)


def _stored_transposed(weight: Weight, rule: Rule, model: Skeleton) -> bool:
    """Whether experts in one tensor are stored [experts, in, out], told from both of their shapes."""
    siblings = [model.weights[name] for name in model.containers[container(weight)]]
    first = [each.shape for each in siblings if model.roles[each.name] == "gate_up" and each.kind == "experts"]
    second = [each.shape for each in siblings if model.roles[each.name] == "down" and each.kind == "experts"]
    if len(first) != 1 or len(second) != 1:
        if rule.transposed:
            raise ValueError("a packed_rowwise plan needs gate_up_proj and down_proj of all experts side by side")
        return False
    (_, rows, columns), (_, outs, ins) = first[0], second[0]
    if rows == 2 * ins and columns == outs:
        return False
    if columns == 2 * outs and rows == ins and not rule.hand_written and rule.source.startswith("tp_plan"):
        return True
    raise ValueError(
        f"gate_up_proj {first[0]} and down_proj {second[0]} are not stored as [experts, 2 x inner, hidden] and "
        "[experts, hidden, inner]: other layouts of experts need a tp_plan that names them (packed_rowwise)"
    )


def _experts_in_rows(weight: Weight, model: Skeleton) -> tuple[int, int] | None:
    """(experts, inner) of a matrix [experts x inner, hidden], as DBRX stores the experts of a layer."""
    if weight.kind != "experts" or len(weight.shape) != 2 or "experts." not in weight.name:
        return None
    block = weight.name[: weight.name.rindex("experts.")]
    router = model.weights.get(f"{block}router.layer.weight")
    if router is None or weight.shape[0] % router.shape[0]:
        raise ValueError(f"the number of experts is not known: there is no {block}router.layer.weight that tells it")
    return router.shape[0], weight.shape[0] // router.shape[0]


def _half(features: int) -> int:
    if features % 2:
        raise ValueError(f"{features} output features are not gate and up of equal size")
    return features // 2


def _decision(style: Style, partition: Partition, weight: Weight, rule: Rule, source: str | None = None) -> Decision:
    bias = None
    if weight.has_bias:
        bias = Partition.replicate() if partition.kind == "row" else partition
    return Decision(
        style,
        partition,
        bias,
        gather_output=rule.gather_output,
        split_input=rule.split_input and style == "row",
        source=source or rule.source,
        hand_written=rule.hand_written,
    )
