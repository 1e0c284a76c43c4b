"""What a weight is for, told from its name as Transformer models spell it, and which module holds it.

A role says what the input and the output of a projection are, which no cut can do without: a projection into heads
reads what every rank has, the one out of attention reads what each rank has a part of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from phalanx.layout.weight import Weight, WeightKind

Role = Literal[
    "query", "key", "value", "qkv", "latent", "expand", "out",  # attention
    "up", "gate_up", "down",  # MLP
    "tokens", "head", "router", "head_norm", "other",
]  # fmt: skip

_ATTENTION: Mapping[str, Role] = {
    **dict.fromkeys(("q_proj", "q", "query", "wq", "q_b_proj", "q_lin", "query_proj"), "query"),
    **dict.fromkeys(("k_proj", "k", "key", "wk", "k_lin", "key_proj"), "key"),
    **dict.fromkeys(("v_proj", "v", "value", "wv", "v_lin", "value_proj"), "value"),
    **dict.fromkeys(("query_key_value", "qkv_proj", "Wqkv", "c_attn", "W_pack", "wqkv", "qkv"), "qkv"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa", "q_a_layernorm", "kv_a_layernorm"), "latent"),
    "kv_b_proj": "expand",
    # Gates of what attention gives, laid out by query heads.
    **dict.fromkeys(("gate_proj", "g_proj"), "query"),
    **dict.fromkeys(("o_proj", "out_proj", "dense", "c_proj", "wo", "o", "Wo", "out_lin"), "out"),
    **dict.fromkeys(
        ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm", "q_ln", "k_ln"),
        "head_norm",
    ),
}  # fmt: skip
_MLP: Mapping[str, Role] = {
    **dict.fromkeys(("gate_proj", "up_proj", "fc1", "fc_in", "c_fc", "dense_h_to_4h", "lin1"), "up"),
    **dict.fromkeys(("w1", "w3", "v1", "wi", "wi_0", "wi_1"), "up"),
    "gate_up_proj": "gate_up",
    **dict.fromkeys(("down_proj", "fc2", "fc_out", "w2", "c_proj", "dense_4h_to_h", "wo", "lin2"), "down"),
    **dict.fromkeys(("gate", "router", "shared_expert_gate", "wg"), "router"),
}  # fmt: skip
_TOKENS = (
    "embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "tokens_embed", "embedding", "embeddings",
    "token_embedding", "shared",
)  # fmt: skip
_HEADS = ("lm_head", "embed_out", "output_layer")
_ADAPTER = re.compile(
    r"\.(base_layer|original_module|modules_to_save\.[^.]+|lora_(?P<factor>[AB])\.[^.]+)(?=\.(weight|bias)$)"
)


def plain(name: str) -> str:
    """The name without what PEFT adds: the weight that an adapter changes, for each of the adapter's two factors."""
    return _ADAPTER.sub("", name).removeprefix("base_model.model.")


def adapter_factor(name: str) -> str | None:
    """ "A" [rank, in] or "B" [out, rank] for a factor of a low-rank adapter, None for a weight of the model."""
    found = _ADAPTER.search(name)
    return found.group("factor") if found is not None else None


def parts(name: str) -> list[str]:
    """The dotted parts of the module that a weight belongs to."""
    return plain(name).removesuffix(".weight").split(".")


def generic(name: str) -> str:
    """The name with layer and expert numbers as `*`, the same for all layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name)


def in_attention(weight: Weight) -> bool:
    """Whether an attention module holds the weight."""
    return weight.attention is not None or any(_is_attention(part) for part in parts(weight.name)[:-1])


def container(weight: Weight) -> str:
    """The name of the attention module or MLP whose weights are cut together."""
    path = parts(weight.name)
    if in_attention(weight):
        ends = [index for index, part in enumerate(path[:-1]) if _is_attention(part)]
        if ends:
            return ".".join(path[: ends[-1] + 1])
    if path[-1] == "dense" and path[-2:-1] in (["intermediate"], ["output"]):
        return ".".join(path[:-2])
    return ".".join(path[:-1])


def role(weight: Weight, head_patterns: Sequence[str] = ()) -> Role:
    """What the weight is for, "other" where its name does not tell.

    Of the two factors of an adapter, one has the role of the weight that it changes; what lies between them is a small
    latent that every rank has whole.
    """
    factor, base = adapter_factor(weight.name), _base_role(weight, head_patterns)
    if factor is None:
        return base
    if base in ("tokens", "head", "router", "other"):
        return "other"
    reads_parts = base in ("out", "down")
    return base if (factor == "A") == reads_parts else "latent"


def _base_role(weight: Weight, head_patterns: Sequence[str]) -> Role:
    path = parts(weight.name)
    leaf = path[-1]
    if weight.kind == "embedding":
        return "tokens" if leaf in _TOKENS else "other"
    if in_attention(weight):
        # StableLM holds one norm a head: q_layernorm.norms.3.
        norm = next((part for part in path[:-1] if _ATTENTION.get(part) == "head_norm"), None)
        return _ATTENTION.get(norm or leaf, "other")
    if weight.kind == "linear" and (
        leaf in _HEADS or path == ["output"] or any(pattern in leaf for pattern in head_patterns)
    ):
        return "head"
    if leaf == "dense" and path[-2:-1] == ["intermediate"]:
        return "up"
    if leaf == "dense" and path[-2:-1] == ["output"]:
        return "down"
    if path[-2:] == ["router", "layer"]:
        return "router"
    return _MLP.get(leaf, "other")


class Skeleton:
    """The weights of a model by name, what each is for, and which are held by one attention module or MLP."""

    def __init__(self, weights: Iterable[Weight], tied: Mapping[str, str], head_patterns: Sequence[str] = ()) -> None:
        by_name = {weight.name: weight for weight in weights}
        for alias, name in tied.items():
            # A tied weight is often listed once. Its other name tells whether it is an embedding there, too.
            for one, other in ((alias, name), (name, alias)):
                if one not in by_name and other in by_name:
                    kind: WeightKind = "embedding" if parts(one)[-1] in _TOKENS else "linear"
                    by_name[one] = replace(by_name[other], name=one, kind=kind, has_bias=False)
        self.weights = by_name
        self.roles = {name: role(weight, head_patterns) for name, weight in by_name.items()}
        self.ties = tuple(tied.items())
        for pair in self.ties:
            pair_roles = [self.roles.get(name) for name in pair]
            for name in pair:
                if "tokens" in pair_roles and name in by_name and by_name[name].kind == "linear":
                    self.roles[name] = "head"
        self._keep_heads_with_shared_biases()
        held: dict[str, list[str]] = {}
        for name, weight in by_name.items():
            held.setdefault(container(weight), []).append(name)
        self.containers = {path: tuple(names) for path, names in held.items()}

    def _keep_heads_with_shared_biases(self) -> None:
        """BERT's output head shares its bias with a module that adds none: such a head is not cut, nor what is tied."""
        for bias in (name for pair in self.ties for name in pair if name.endswith(".bias")):
            head = f"{bias.removesuffix('.bias')}.weight"
            if self.roles.get(head) == "head":
                for name in (head, *(name for pair in self.ties if head in pair for name in pair)):
                    self.roles[name] = "other"

    def with_role(self, names: Iterable[str], *wanted: Role) -> list[str]:
        """Those of `names` that have one of the wanted roles."""
        return [name for name in names if self.roles[name] in wanted]


def _is_attention(part: str) -> bool:
    return part.lower().endswith(("attn", "attention"))
