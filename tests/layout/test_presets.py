"""Each preset cuts all projections of the layers of its architecture, under the names that the models have."""

import pytest

from phalanx.layout import AttentionShape, RuleError, Weight, decide
from phalanx.layout.presets import PRESETS, preset

H, KV, D, HIDDEN, INNER, EXPERTS = 4, 2, 2, 6, 8, 3
Q, K = H * D, KV * D


def layer(attention, mlp, *, kv=KV, kind="linear", path="model.layers.0"):
    """The weights of a layer from {name: (out, in)}, under `path`."""
    shape = AttentionShape(H, kv, D)
    weights = []
    for name, size in {**attention, **mlp}.items():
        what = "experts" if len(size) == 3 else kind
        held = shape if name in attention else None
        full = name if what == "experts" else f"{name}.weight"
        weights.append(Weight(f"{path}.{full}", size if kind == "linear" else size[::-1], what, attention=held))
    return weights


SEPARATE = {f"self_attn.{n}_proj": s for n, s in {"q": (Q, HIDDEN), "k": (K, HIDDEN), "v": (K, HIDDEN)}.items()}
OUT = {"self_attn.o_proj": (HIDDEN, Q)}
GATED = {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
FUSED = {"self_attn.qkv_proj": (Q + 2 * K, HIDDEN), **OUT}
PLAIN = {"mlp.dense_h_to_4h": (INNER, HIDDEN), "mlp.dense_4h_to_h": (HIDDEN, INNER)}
SHARED = {f"mlp.shared_experts.{name.removeprefix('mlp.')}": size for name, size in GATED.items()}
ONE_TENSOR = {
    "mlp.experts.gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN),
    "mlp.experts.down_proj": (EXPERTS, HIDDEN, INNER),
    "mlp.gate": (EXPERTS, HIDDEN),
}
LISTED = {
    f"block_sparse_moe.experts.{e}.{n}": s
    for e in range(EXPERTS)
    for n, s in {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w2": (HIDDEN, INNER)}.items()
} | {"block_sparse_moe.gate": (EXPERTS, HIDDEN)}
LATENT = {
    "self_attn.q_a_proj": (5, HIDDEN),
    "self_attn.q_b_proj": (Q, 5),
    "self_attn.kv_a_proj_with_mqa": (5, HIDDEN),
    "self_attn.kv_b_proj": (H * 3, 4),
    **OUT,
}


def neox(attention, size):
    return {f"{attention}.query_key_value": (size, HIDDEN), f"{attention}.dense": (HIDDEN, Q)}


def mlp(first, second):
    return {first: (INNER, HIDDEN), second: (HIDDEN, INNER)}


LLAMA = layer({**SEPARATE, **OUT}, GATED)
MOE = layer({**SEPARATE, **OUT}, {**ONE_TENSOR, **SHARED})
MODELS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "stablelm", "olmo2"), LLAMA),
    "llama_gqa": layer(FUSED, GATED),
    "phi3": layer(FUSED, {"mlp.gate_up_proj": (2 * INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}),
    "gpt_neox": layer(neox("attention", 3 * Q), PLAIN, kv=H),
    "bloom": layer(neox("self_attention", 3 * Q), PLAIN, kv=H),
    "falcon": layer(neox("self_attention", Q + 2 * K), PLAIN),
    "chatglm": layer(
        neox("self_attention", Q + 2 * K), {**PLAIN, "mlp.dense_h_to_4h": (2 * INNER, HIDDEN)}
    ),
    "mixtral": layer({**SEPARATE, **OUT}, LISTED),
    "qwen2_moe": MOE,
    "qwen3_moe": layer({**SEPARATE, **OUT}, ONE_TENSOR),
    "deepseek_v2": layer(LATENT, {**ONE_TENSOR, **SHARED}, kv=H) + layer(LATENT, GATED, kv=H, path="model.layers.1"),
    "deepseek_v3": layer(LATENT, {**ONE_TENSOR, **SHARED}, kv=H),
    "gpt2": layer(
        {"attn.c_attn": (3 * Q, HIDDEN), "attn.c_proj": (HIDDEN, Q)}, mlp("mlp.c_fc", "mlp.c_proj"), kv=H, kind="conv1d"
    ),
    "gpt_bigcode": layer(
        {"attn.c_attn": (Q + 2 * D, HIDDEN), "attn.c_proj": (HIDDEN, Q)}, mlp("mlp.c_fc", "mlp.c_proj"), kv=1
    ),
    "gptj": layer(
        {f"attn.{n}_proj": (Q, HIDDEN) for n in "qkv"} | {"attn.out_proj": (HIDDEN, Q)},
        mlp("mlp.fc_in", "mlp.fc_out"),
        kv=H,
    ),
    "opt": layer({**SEPARATE, "self_attn.out_proj": (HIDDEN, Q)}, mlp("fc1", "fc2")),
    "phi": layer({**SEPARATE, "self_attn.dense": (HIDDEN, Q)}, mlp("mlp.fc1", "mlp.fc2")),
    "mpt": layer(
        {"attn.Wqkv": (3 * Q, HIDDEN), "attn.out_proj": (HIDDEN, Q)}, mlp("ffn.up_proj", "ffn.down_proj"), kv=H
    ),
    "dbrx": layer(
        {"norm_attn_norm.attn.Wqkv": (Q + 2 * K, HIDDEN), "norm_attn_norm.attn.out_proj": (HIDDEN, Q)},
        {"ffn.router.layer": (EXPERTS, HIDDEN)},
    )
    + [
        Weight(f"model.layers.0.ffn.experts.mlp.{n}", (EXPERTS * INNER, HIDDEN), "experts") for n in ("w1", "v1", "w2")
    ],
}  # fmt: skip
WHOLE = ("mlp.gate", "block_sparse_moe.gate", "ffn.router.layer", "q_a_proj", "kv_a_proj_with_mqa")


def test_there_is_a_model_for_each_preset():
    assert set(MODELS) == set(PRESETS)


@pytest.mark.parametrize("model_type", ["of the preset", "unknown"])
@pytest.mark.parametrize("name", MODELS)
def test_a_preset_cuts_all_projections(name, model_type):
    weights = MODELS[name]
    kind = name if model_type == "of the preset" else None
    decisions = decide(weights, model_type=kind, config=None, preset=name, tp_plan=None, tied={}, world=2)
    for weight in weights:
        decision = decisions[weight.name]
        kept = weight.name.removesuffix(".weight").endswith(WHOLE)
        assert (decision.style == "skip") == kept, weight.name
        assert decision.source.startswith(f"preset {name}") and not decision.hand_written
    # The structure of names says the same wherever it knows the family.
    if model_type != "unknown" and name != "llama_gqa":
        found = decide(weights, model_type=name, config=None, preset=None, tp_plan=None, tied={}, world=2)
        if name != "olmo2":
            assert {n: d.weight for n, d in found.items()} == {n: d.weight for n, d in decisions.items()}


def test_olmo2_computes_attention_whole():
    decisions = decide(MODELS["olmo2"], model_type=None, config=None, preset="olmo2", tp_plan=None, tied={}, world=2)
    assert all(decisions[f"model.layers.0.self_attn.{n}_proj.weight"].gather_output for n in "qkv")
    assert decisions["model.layers.0.self_attn.o_proj.weight"].split_input


def test_names_are_matched_in_any_case_and_whole():
    assert preset("PHI3") == preset("phi3")
    with pytest.raises(RuleError, match="the presets are bloom, chatglm, dbrx"):
        preset("phi33")


def test_patterns_do_not_reach_into_other_modules():
    names = [
        "model.layers.0.cross_self_attn_x.o_proj.weight", "model.layers.0.mlp.gate_proj_x.weight", "x.mlp.experts_gate",
    ]  # fmt: skip
    assert not any(spec.matching(name) for name in names for each in PRESETS.values() for spec in each.specs)
