"""Weights that work together are made to agree: the projections of one attention or MLP, its norms, tied weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from phalanx.layout.decision import Decision
from phalanx.layout.fused import ranks_without_heads
from phalanx.layout.partition import Partition, pieces
from phalanx.layout.roles import Role, Skeleton, generic, in_attention, parts
from phalanx.layout.structure import norm_between, norm_of_each_head, wide_norm

_INTO_ATTENTION: tuple[Role, ...] = ("query", "key", "value", "qkv", "expand")
_INTO_MLP: tuple[Role, ...] = ("up", "gate_up")


def agree(model: Skeleton, decisions: Mapping[str, Decision], world: int) -> tuple[dict[str, Decision], list[str]]:
    """The decisions, made to agree, and a sentence for each group that cannot."""
    result = dict(decisions)
    problems: list[str] = []

    cut: set[str] = set()
    checked: set[tuple[object, ...]] = set()

    def same(into: list[str], out: list[str]) -> list[str]:
        # Layers of one kind are all alike: one of them is looked at.
        key = tuple((model.weights[name].shape, result[name].weight) for name in (*into, *out))
        if key in checked:
            return []
        checked.add(key)
        return _same_features(model, result, into, out, world)

    for path, names in model.containers.items():
        into = model.with_role(names, *_INTO_ATTENTION)
        if into:
            out = model.with_role(names, "out")
            problems += _projections(result, into, out) or same(model.with_role(names, "query"), out)
            if any(result[name].splits_output for name in into):
                problems += _inside_attention(model, result, path, world)
            else:
                _outside(result, model.with_role(names, "head_norm", "latent"))
        else:
            into, out = model.with_role(names, *_INTO_MLP), model.with_role(names, "down")
            problems += _projections(result, into, out) or same(into, out)
        first = next((name for name in into if result[name].splits_output), None)
        between = norm_between(model, names)
        if first is not None and between is not None:
            problems.append(
                f"{generic(between)} norms all features that {generic(first)} ({result[first].source}) cuts over the "
                "ranks: leave this module whole"
            )
        if first is not None:
            cut.add(path)
            problems += _undealt(model, result, names, world)
    _inside(model, result, cut)
    _tie(model, result)
    return result, problems


def _projections(result: dict[str, Decision], into: list[str], out: Iterable[str]) -> list[str]:
    """The projections into a module are all cut or none, and the one out of it reads what they give."""
    cut = [name for name in into if result[name].splits_output]
    whole = [name for name in into if name not in cut]
    if not into:
        return []
    if cut and whole:
        return [
            f"{generic(cut[0])} ({result[cut[0]].source}) is cut, but {generic(whole[0])} ({result[whole[0]].source}) "
            "beside it gives its whole output: cut both or neither"
        ]
    for name in out:
        decision = result[name]
        reads_part = decision.weight.kind == "row"
        if cut and not reads_part:
            return [
                f"{generic(name)} ({decision.source}) is not cut, but it reads the cut output of {generic(cut[0])} "
                f"({result[cut[0]].source}): cut it by 'row'"
            ]
        if reads_part and decision.style == "row":
            partition = decision.weight if cut else Partition.row(dim=decision.weight.dim)
            result[name] = replace(decision, weight=partition, split_input=not cut)
        elif reads_part and not cut:
            return [f"{generic(name)} ({decision.source}) is cut, but {generic(whole[0])} is not: cut both or neither"]
    return []


def _inside_attention(model: Skeleton, result: dict[str, Decision], path: str, world: int) -> list[str]:
    names = model.containers[path]
    problems = []
    for heads in {model.weights[name].attention for name in names if result[name].is_cut} - {None}:
        empty = ranks_without_heads(heads, world) if heads is not None else []
        if heads is not None and empty:
            problems.append(
                f"{generic(path)}: {heads.num_heads} query heads over {heads.num_kv_heads} KV heads leave ranks "
                f"{empty} of {world} without a head, and attention without heads cannot run: use fewer ranks"
            )
    for name in model.with_role(names, "head_norm"):
        if norm_of_each_head(model, name):
            problems.append(
                f"{generic(name)} is a norm for each head, so its projection must give its whole output: set "
                "'gather_output' for Q, K and V"
            )
        elif wide_norm(model, name):
            problems.append(
                f"{generic(name)} norms all heads at once, so its projection must give its whole output: set "
                "'gather_output' for Q, K and V"
            )
    # A latent projection and its norm act before the cut: their gradients are whole.
    for name in model.with_role(names, "head_norm"):
        result[name] = replace(result[name], sum_gradient=True)
    return problems


def _undealt(model: Skeleton, result: Mapping[str, Decision], names: Iterable[str], world: int) -> list[str]:
    """What in a cut attention depends on heads that no rule deals out."""
    problems = []
    for name in names:
        weight, decision = model.weights[name], result[name]
        if not in_attention(weight):
            continue
        size = weight.shape[decision.weight.dim] if decision.is_cut else 0
        if weight.attention is None and size % world:
            problems.append(
                f"{generic(name)} ({decision.source}): its heads are not known, and its {size} features do not divide "
                f"over {world} ranks"
            )
        heads = weight.attention.num_heads if weight.attention is not None else 0
        if weight.kind == "other" and model.roles[name] == "other" and weight.shape == (heads,):
            problems.append(f"{generic(name)} holds a value a head, which cannot be cut: leave this attention whole")
    return problems


def _inside(model: Skeleton, result: dict[str, Decision], cut: set[str]) -> None:
    """Small parameters inside a cut module, such as those of an activation: each rank has a part of their gradient."""
    for name, weight in model.weights.items():
        path = parts(name)
        inside = any(".".join(path[:end]) in cut for end in range(1, len(path) - 1))
        if weight.kind == "other" and len(weight.shape) < 2 and inside:
            result[name] = replace(result[name], sum_gradient=True)


def _outside(result: dict[str, Decision], names: Iterable[str]) -> None:
    for name in names:
        result[name] = replace(result[name], sum_gradient=False)


def _same_features(
    model: Skeleton, result: Mapping[str, Decision], into: Iterable[str], out: Iterable[str], world: int
) -> list[str]:
    """Each rank's features of the projections into a module are those that its projection out of it reads."""
    for second in out:
        weight = model.weights[second]
        if not result[second].is_cut or result[second].split_input:
            continue
        size = weight.shape[result[second].weight.dim]
        for first in into:
            whole = model.weights[first].shape[result[first].weight.dim] if result[first].splits_output else 0
            copies = 2 if model.roles[first] in _INTO_MLP and whole == 2 * size else 1
            if whole != copies * size:
                continue
            for rank in range(world):
                given = _features(model, result, first, rank, world)
                read = _features(model, result, second, rank, world)
                read = [each + copy * size for copy in range(copies) for each in read]
                if given != read:
                    return [
                        f"{generic(first)} ({result[first].source}) gives rank {rank} its features {_short(given)}, "
                        f"but {generic(second)} ({result[second].source}) reads {_short(read)}: cut them alike"
                    ]
    return []


def _features(model: Skeleton, result: Mapping[str, Decision], name: str, rank: int, world: int) -> list[int]:
    partition = result[name].weight
    boxes = pieces(partition, model.weights[name].shape, rank, world)
    return [i for box in boxes for i in range(*box.global_slices[partition.dim].indices(1 << 62))]


def _short(numbers: list[int]) -> str:
    """The numbers as runs, for people: 0..3, 8..11."""
    starts = [n for before, n in zip([None, *numbers], numbers, strict=False) if before is None or n != before + 1]
    ends = [n for n, after in zip(numbers, [*numbers[1:], None], strict=True) if after is None or after != n + 1]
    return ", ".join(f"{a}..{b}" for a, b in zip(starts, ends, strict=True)) or "none"


def _tie(model: Skeleton, result: dict[str, Decision]) -> None:
    """Tied weights are one parameter: both are cut by the vocabulary or neither. A user's 'skip' keeps both whole."""
    for pair in model.ties:
        present = [name for name in pair if name in result]
        vocab = [name for name in present if result[name].style == "vocab"]
        kept = [name for name in present if result[name].style == "skip" and result[name].hand_written]
        for name in present:
            weight = model.weights[name]
            bias = weight.has_bias
            if kept:
                whole = Partition.replicate()
                result[name] = replace(
                    result[kept[0]], style="skip", weight=whole, bias=whole if bias else None, gather_output=False
                )
            elif vocab and name not in vocab:
                result[name] = replace(
                    result[vocab[0]], bias=Partition.vocab() if bias else None, gather_output=weight.kind == "linear"
                )
