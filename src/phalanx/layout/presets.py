"""Rules by name for known architectures. How fused projections are laid out stands in `phalanx.layout.fused`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.layout.fused import REFUSED
from phalanx.layout.rules import LayerSpec, PartitionType, RuleError, near


@dataclass(frozen=True)
class Preset:
    """Rules of one architecture, and the model type whose fused layouts hold for them (None: the model's own)."""

    specs: tuple[LayerSpec, ...]
    family: str | None = None


def preset(name: str) -> Preset:
    """The preset of this name, in any case. Raises RuleError for an unknown one."""
    key = name.lower()
    if key in REFUSED:
        raise RuleError([f"there is no preset {name!r}: {REFUSED[key]}"])
    if key not in PRESETS:
        raise RuleError([f"unknown preset {name!r}{near(key, PRESETS)}: the presets are {', '.join(sorted(PRESETS))}"])
    return PRESETS[key]


def _specs(**ends: str) -> tuple[LayerSpec, ...]:
    """One spec a partition type, of weights whose module name ends in one of the given (separated by blanks)."""
    kinds: Mapping[str, PartitionType] = {"column": "column", "row": "row", "skip": "skip", "gather": "column"}
    return tuple(
        LayerSpec(
            tuple(rf".*\b{end}(\.weight)?$" for end in names.split()),
            kinds[kind],
            gather_output=kind == "gather",
        )
        for kind, names in ends.items()
    )


_EXPERTS = r"experts\.(\d+\.)?"
_LLAMA = _specs(row=r"self_attn\.o_proj mlp\.down_proj", column=r"self_attn\.[qkv]_proj mlp\.(up|gate)_proj")
_NEOX = _specs(
    row=r"(self_)?attention\.dense mlp\.dense_4h_to_h",
    column=r"(self_)?attention\.query_key_value mlp\.dense_h_to_4h",
)
_PACKED = _specs(row=r"self_attn\.o_proj mlp\.down_proj", column=r"self_attn\.qkv_proj mlp\.gate_up_proj")
_SEQUENTIAL = r"self_attn\.[qkv]_proj fc1"
_GPT2 = _specs(row=r"attn\.c_proj mlp\.c_proj", column=r"attn\.c_attn attn\.q_attn mlp\.c_fc")
_MOE = _specs(
    skip=r"mlp\.gate block_sparse_moe\.gate mlp\.shared_expert_gate",
    row=rf"self_attn\.o_proj {_EXPERTS}w2 {_EXPERTS}down_proj shared_experts?\.down_proj mlp\.down_proj",
    column=rf"self_attn\.[qkv]_proj {_EXPERTS}w[13] {_EXPERTS}(gate|up|gate_up)_proj "
    r"shared_experts?\.(gate|up)_proj mlp\.(gate|up)_proj",
)
_MLA = _specs(
    skip=r"self_attn\.q_a_proj self_attn\.kv_a_proj_with_mqa mlp\.gate",
    row=rf"self_attn\.o_proj {_EXPERTS}down_proj shared_experts\.down_proj mlp\.down_proj",
    column=rf"self_attn\.q_proj self_attn\.q_b_proj self_attn\.kv_b_proj {_EXPERTS}(gate|up|gate_up)_proj "
    r"shared_experts\.(gate|up)_proj mlp\.(gate|up)_proj",
)

PRESETS: Mapping[str, Preset] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "stablelm"),
        Preset(_LLAMA),
    ),
    # The same with Q, K and V in one projection [Q; K; V].
    "llama_gqa": Preset(
        _specs(row=r"self_attn\.o_proj mlp\.down_proj", column=r"self_attn\.qkv_proj mlp\.(up|gate)_proj"), "phi3"
    ),
    # Its norms see all heads of Q and of K at once, so attention is computed whole on every rank.
    "olmo2": Preset(
        _specs(
            gather=r"self_attn\.[qkv]_proj",
            row=r"self_attn\.o_proj mlp\.down_proj",
            column=r"mlp\.(up|gate)_proj",
        )
    ),
    "phi3": Preset(_PACKED, "phi3"),
    "gpt_neox": Preset(_NEOX, "gpt_neox"),
    "bloom": Preset(_NEOX, "bloom"),
    "falcon": Preset(_NEOX, "falcon"),
    "chatglm": Preset(_NEOX, "chatglm"),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), Preset(_MOE)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), Preset(_MLA)),
    "gpt2": Preset(_GPT2, "gpt2"),
    "gpt_bigcode": Preset(_GPT2, "gpt_bigcode"),
    "gptj": Preset(_specs(row=r"attn\.out_proj mlp\.fc_out", column=r"attn\.[qkv]_proj mlp\.fc_in")),
    "opt": Preset(_specs(row=r"self_attn\.out_proj fc2", column=_SEQUENTIAL)),
    "phi": Preset(_specs(row=r"self_attn\.dense mlp\.fc2", column=r"self_attn\.[qkv]_proj mlp\.fc1")),
    "mpt": Preset(_specs(row=r"attn\.out_proj ffn\.down_proj", column=r"attn\.Wqkv ffn\.up_proj"), "mpt"),
    "dbrx": Preset(
        _specs(
            skip=r"ffn\.router\.layer",
            row=r"attn\.out_proj ffn\.experts\.mlp\.w2",
            column=r"attn\.Wqkv ffn\.experts\.mlp\.(w1|v1)",
        ),
        "dbrx",
    ),
}
