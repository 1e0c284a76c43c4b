"""Real architectures, tiny and without memory: with the plan they ship and without one, all is cut that can be."""

import math

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from phalanx.layout import AttentionShape, Weight, decide, local_shape, query_heads

SIZES = {
    "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 101,
    "intermediate_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NO_GROUPS = {**SIZES, "num_key_value_heads": 8}
GPT2 = {"n_embd": 64, "n_head": 8, "n_layer": 1, "vocab_size": 101, "bos_token_id": 1, "eos_token_id": 2}
MPT = {"d_model": 64, "n_heads": 8, "n_layers": 1, "vocab_size": 101}
LATENT = {
    **NO_GROUPS, "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 4, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
FALCON = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "intermediate_size")}
ROUTERS = ("mlp.gate", "block_sparse_moe.gate", "mlp.shared_expert_gate", "router.layer")
LATENTS = ("q_a_proj", "kv_a_proj_with_mqa")
POSITIONS = ("wpe", "embed_positions")

# (model type, config, KV heads, endings of the names of matrices that stay whole)
MODELS = [
    ("llama", SIZES, 2, ()),
    ("qwen2", SIZES, 2, ()),
    ("qwen3", {**SIZES, "head_dim": 8}, 2, ()),
    ("mistral", SIZES, 2, ()),
    ("gpt_neox", NO_GROUPS, 8, ()),
    ("phi3", SIZES, 2, ()),
    ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}, 2, ()),
    ("falcon", {**FALCON, "multi_query": True}, 1, ()),
    ("falcon", {**FALCON, "multi_query": False, "alibi": True, "bias": True}, 8, ()),
    ("bloom", {"hidden_size": 64, "n_head": 8, "n_layer": 1, "vocab_size": 101}, 8, ()),
    ("opt", {**NO_GROUPS, "ffn_dim": 96, "word_embed_proj_dim": 64}, 8, POSITIONS),
    ("phi", {**SIZES, "qk_layernorm": True}, 2, ()),
    ("gpt2", GPT2, 8, POSITIONS),
    ("gptj", {**GPT2, "rotary_dim": 4}, 8, ()),
    ("gpt_bigcode", GPT2, 1, POSITIONS),
    ("gpt_bigcode", {**GPT2, "multi_query": False}, 8, POSITIONS),
    ("mixtral", {**SIZES, "num_local_experts": 4}, 2, ROUTERS),
    ("gemma", {**SIZES, "head_dim": 8}, 2, ()),
    ("gemma2", {**SIZES, "head_dim": 8}, 2, ()),
    ("gemma3_text", {**SIZES, "head_dim": 8}, 2, ()),
    ("mpt", MPT, 8, ()),
    (
        "dbrx",
        {
            **MPT,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4},
        },
        2,
        ROUTERS,
    ),
    ("stablelm", SIZES, 2, ()),
    ("stablelm", {**SIZES, "qk_layernorm": True}, 2, ()),
    ("olmo2", SIZES, 2, ()),
    ("deepseek_v2", LATENT, 8, (*ROUTERS, *LATENTS)),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None}, 8, (*ROUTERS, *LATENTS)),
    ("deepseek_v3", LATENT, 8, (*ROUTERS, *LATENTS)),
    ("qwen3_moe", {**SIZES, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 32}, 2, ROUTERS),
    ("qwen2_moe", {**SIZES, "num_experts": 4, "moe_intermediate_size": 32}, 2, ROUTERS),
    ("glm", {**SIZES, "head_dim": 8}, 2, ()),
    ("starcoder2", SIZES, 2, ()),
    ("cohere", {**SIZES, "use_qk_norm": True}, 2, ("q_norm", "k_norm")),
]


def weights_of(model, kv):
    """Names and shapes as layout wants them."""
    weights, seen, tied = [], {}, {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}"
            if id(parameter) in seen:
                tied[full] = seen[id(parameter)]
                continue
            seen[id(parameter)] = full
            if name == "bias":
                continue
            matrix = parameter.dim() == 2 and name == "weight"
            kind = (
                "embedding" if isinstance(module, nn.Embedding)
                else "conv1d" if isinstance(module, Conv1D)
                else "linear" if isinstance(module, nn.Linear)
                else "experts" if parameter.dim() == 3 or (parameter.dim() == 2 and not matrix)
                else "norm" if "norm" in type(module).__name__.lower()
                else "other"
            )  # fmt: skip
            attention = AttentionShape(8, kv, 8) if "attn." in path or "attention." in path else None
            weights.append(
                Weight(full, tuple(parameter.shape), kind, getattr(module, "bias", None) is not None, attention)
            )
    return weights, tied


@pytest.fixture(scope="module", params=MODELS, ids=lambda case: case[0])
def case(request):
    model_type, sizes, kv, whole = request.param
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    return model_type, *weights_of(model, kv), dict(model.tp_plan or {}), kv, whole


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("with_plan", [True, False])
def test_everything_that_can_be_cut_is_cut(case, world, with_plan):
    model_type, weights, tied, plan, kv, whole = case
    plan = plan if with_plan else None
    decisions = decide(weights, model_type=model_type, config=None, preset=None, tp_plan=plan, tied=tied, world=world)
    for weight in weights:
        decision = decisions[weight.name]
        shapes = [local_shape(decision.weight, weight.shape, rank, world) for rank in range(world)]
        if len(weight.shape) == 1 or weight.name.removesuffix(".weight").endswith(whole):
            assert decision.style == "skip" and set(shapes) == {weight.shape}, weight.name
            continue
        assert decision.style != "skip", (weight.name, decision.source)
        total = sum(math.prod(shape) for shape in shapes)
        copied = kv < world and any(name in weight.name for name in ("k_proj", "v_proj", "qkv", "c_attn", "key_value"))
        if copied and not decision.gather_output:
            # K and V of 8 elements a head are on more than one rank.
            kv_rows = 8 * (1 if "_proj" in weight.name and "qkv" not in weight.name else 2)
            ins = math.prod(weight.shape) // max(weight.out_features, 1)
            assert total == math.prod(weight.shape) + kv_rows * ins * (world - kv), weight.name
        else:
            assert total == math.prod(weight.shape), weight.name
        assert max(map(math.prod, shapes)) < math.prod(weight.shape)
        if weight.has_bias:
            assert decision.bias.kind == ("replicate" if decision.style == "row" else decision.weight.kind)


def test_output_projections_read_the_heads_of_their_rank(case):
    model_type, weights, tied, plan, kv, _ = case
    decisions = decide(weights, model_type=model_type, config=None, preset=None, tp_plan=plan, tied=tied, world=4)
    rows = [w for w in weights if w.attention and decisions[w.name].style == "row"]
    assert rows
    for weight in rows:
        shapes = [local_shape(decisions[weight.name].weight, weight.shape, rank, 4) for rank in range(4)]
        width = weight.in_features // 8
        heads = [len(query_heads(8, kv, rank, 4)) for rank in range(4)]
        assert [shape[weight.in_dim] for shape in shapes] == [count * width for count in heads]


def test_norms_of_heads_sum_their_gradients_unless_attention_is_whole(case):
    model_type, weights, tied, plan, _, _ = case
    decisions = decide(weights, model_type=model_type, config=None, preset=None, tp_plan=plan, tied=tied, world=2)
    split = any(decisions[w.name].split_input for w in weights)
    for weight in weights:
        if any(name in weight.name for name in ("q_norm", "k_norm", "q_layernorm", "k_layernorm")):
            assert decisions[weight.name].sum_gradient == (not split)
        else:
            assert not decisions[weight.name].sum_gradient


def test_tied_heads_go_with_their_embeddings(case):
    model_type, weights, tied, plan, _, _ = case
    decisions = decide(weights, model_type=model_type, config=None, preset=None, tp_plan=plan, tied=tied, world=2)
    for alias, name in tied.items():
        assert decisions[alias].style == decisions[name].style == "vocab"
        assert decisions[alias].gather_output != decisions[name].gather_output
    vocab = {name for name, decision in decisions.items() if decision.style == "vocab"}
    assert len(vocab) == 2
