"""What names alone tell: which weights of a model that comes without rules are cut, and how.

An attention module or an MLP is cut as a whole or not at all, and only if each of its weights is understood: a weight
that nobody expected (a sink a head, a convolution over heads) may depend on all heads.
"""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.layout.decision import Rule
from phalanx.layout.fused import QKV_ORDERS, heads_fit
from phalanx.layout.roles import Skeleton, generic, parts

_SOURCE = "structure"
_MODULES = ("attn", "attention", "mlp", "ffn", "feed_forward")


def structural(model: Skeleton, family: str | None) -> dict[str, Rule]:
    """One rule for every weight of the model."""
    rules = {name: Rule("skip", "structure: replicated", family) for name in model.weights}
    not_cut: dict[str, str] = {}
    for path, names in model.containers.items():
        reason = _attention_problem(model, names, family) if _has_attention(model, names) else None
        if reason is not None:
            not_cut.setdefault(generic(path), reason)
    for path, names in model.containers.items():
        if _has_attention(model, names):
            # Layers of one kind go together: one may hand to the others what depends on its heads.
            reason = not_cut.get(generic(path))
            if reason is None:
                rules.update(_attention(model, names, family))
            else:
                rules.update({name: Rule("skip", f"structure: replicated, {reason}", family) for name in names})
        elif _is_mlp(model, names):
            for name in names:
                style = {"up": "column", "gate_up": "column", "down": "row"}.get(model.roles[name])
                if style is not None:
                    rules[name] = Rule("column" if style == "column" else "row", _SOURCE, family)
    for name in model.with_role(model.weights, "tokens", "head"):
        rules[name] = Rule("vocab", _SOURCE, family)
    return rules


def _has_attention(model: Skeleton, names: tuple[str, ...]) -> bool:
    return bool(model.with_role(names, "query", "key", "value", "qkv", "expand"))


def _attention_problem(model: Skeleton, names: tuple[str, ...], family: str | None) -> str | None:
    unknown = not_understood(model, names)
    if unknown is not None:
        return f"{generic(unknown)} is not understood"
    if not all(heads_fit(model.weights[name], model.roles[name]) for name in names):
        return "the heads of this attention are not known"
    roles = {model.roles[name] for name in names}
    if "qkv" in roles and (family or "") not in QKV_ORDERS:
        return f"the layout of its QKV projection is not known for model type {family!r}"
    if "out" not in roles or not ("qkv" in roles or {"query", "key", "value"} <= roles or {"query", "expand"} <= roles):
        return "its projections are not Q, K, V and output"
    return None


def not_understood(model: Skeleton, names: Iterable[str]) -> str | None:
    """A weight of an attention module that nobody expected there, and that may depend on all heads."""
    names = list(names)
    if not model.with_role(names, "query", "key", "value", "qkv", "expand"):
        return None
    unknown = (name for name in names if model.roles[name] == "other" and model.weights[name].kind != "norm")
    return next(unknown, None) or norm_between(model, names)


def _attention(model: Skeleton, names: tuple[str, ...], family: str | None) -> dict[str, Rule]:
    whole = needs_whole_heads(model, names)
    rules = {name: Rule("skip", "structure: replicated", family) for name in names}
    for name in model.with_role(names, "query", "key", "value", "qkv", "expand"):
        rules[name] = Rule("column", _SOURCE, family, gather_output=whole)
    for name in model.with_role(names, "out"):
        rules[name] = Rule("row", _SOURCE, family, split_input=whole)
    return rules


def needs_whole_heads(model: Skeleton, names: Iterable[str]) -> bool:
    """Whether an attention module has a norm of Q or K that is not the same small one for each head."""
    norms = model.with_role(names, "head_norm")
    return any(wide_norm(model, name) or norm_of_each_head(model, name) for name in norms)


def wide_norm(model: Skeleton, name: str) -> bool:
    """Whether a norm of Q or K sees all of its heads at once."""
    weight = model.weights[name]
    heads = weight.attention
    return heads is not None and heads.num_heads > 1 and weight.shape[-1] > max(heads.head_dim, heads.value_dim)


def norm_of_each_head(model: Skeleton, name: str) -> bool:
    """Whether it is one of several norms, or one with several rows: one for each head."""
    return len(model.weights[name].shape) > 1 or ".norms." in name


def norm_between(model: Skeleton, names: Iterable[str]) -> str | None:
    """A norm that sees all features between the projections of an attention module or MLP, which no rank has then."""
    names = list(names)
    widths = {
        model.weights[name].in_features
        for name in model.with_role(names, "out", "down")
        if model.weights[name].kind in ("linear", "conv1d")
    }
    for name in names:
        path = parts(name)
        inside = len(path) > 1 and path[-2].lower().endswith(_MODULES)
        unknown_norm = model.weights[name].kind == "norm" and model.roles[name] == "other"
        if inside and unknown_norm and model.weights[name].shape[-1] in widths:
            return name
    return None


def _is_mlp(model: Skeleton, names: tuple[str, ...]) -> bool:
    roles = ("up", "gate_up", "down", "router", "latent")
    understood = all(
        model.weights[name].kind == "norm"
        or model.roles[name] == "router"
        or (model.roles[name] in roles and model.weights[name].kind != "other")
        for name in names
    )
    out = {tuple(parts(name)) for name in model.with_role(names, "down")}
    return (
        understood
        and norm_between(model, names) is None
        and bool(model.with_role(names, "up", "gate_up"))
        and len(out) == 1
    )
