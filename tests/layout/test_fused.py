"""Each rank holds those heads of a fused projection that it owns, in the order in which the forward reads them."""

import pytest
import torch

from phalanx.layout import AttentionShape, Weight, decide, kv_heads, query_heads, shard

HIDDEN, DIM = 5, 4


def labelled(order, heads, kv):
    """[out, hidden] whose rows are (part, head, element) in one of the orders in which families store Q, K and V."""
    rows = {part: [[(part, h, i) for i in range(DIM)] for h in range(n)] for part, n in enumerate((heads, kv, kv))}
    q, k, v = (rows[part] for part in range(3))
    group = heads // kv
    if order == "stacked":
        stored = [*q, *k, *v]
    else:
        stored = [head for h in range(kv) for head in (*q[h * group : (h + 1) * group], k[h], v[h])]
    flat = [label for head in stored for label in head]
    return torch.tensor([100 * part + 10 * head + i for part, head, i in flat]).unsqueeze(1).expand(-1, HIDDEN).clone()


def read(rows, order, local_heads, local_kv):
    """What the forward of a family takes for Q, K and V of a weight with so many heads: [heads, DIM] each."""
    rows = rows[:, 0]
    if order == "stacked":
        q, k, v = rows.split([local_heads * DIM, local_kv * DIM, local_kv * DIM])
        return q.view(-1, DIM), k.view(-1, DIM), v.view(-1, DIM)
    if order == "head_major":
        view = rows.view(local_heads, 3, DIM)
        return view[:, 0], view[:, 1], view[:, 2]
    view = rows.view(local_kv, local_heads // local_kv + 2, DIM)
    return view[:, :-2].reshape(-1, DIM), view[:, -2], view[:, -1]


def owned(part, heads):
    return torch.tensor([[100 * part + 10 * h + i for i in range(DIM)] for h in heads])


# (model type, stored as, read as, query heads, KV heads)
FAMILIES = [
    ("gpt_neox", "grouped", "head_major", 8, 8),
    ("gpt_neox", "grouped", "head_major", 6, 6),
    ("bloom", "grouped", "head_major", 8, 8),
    ("falcon", "grouped", "head_major", 8, 8),
    ("falcon", "grouped", "grouped", 8, 2),
    ("falcon", "grouped", "grouped", 6, 3),
    ("falcon", "stacked", "stacked", 7, 1),
    ("gpt_bigcode", "stacked", "stacked", 8, 1),
    ("gpt_bigcode", "grouped", "head_major", 8, 8),
    ("phi3", "stacked", "stacked", 8, 2),
    ("phi3", "stacked", "stacked", 9, 3),
    ("mpt", "stacked", "stacked", 8, 8),
    ("dbrx", "stacked", "stacked", 8, 2),
    ("chatglm", "stacked", "stacked", 8, 2),
    ("internlm2", "grouped", "grouped", 8, 2),
]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("model_type", "stored", "as_read", "heads", "kv"), FAMILIES)
def test_each_rank_gets_its_heads(model_type, stored, as_read, heads, kv, world):
    rows = labelled(stored, heads, kv)
    shape = AttentionShape(heads, kv, DIM)
    qkv = Weight("h.0.attn.qkv_proj.weight", tuple(rows.shape), "linear", has_bias=True, attention=shape)
    out = Weight("h.0.attn.o_proj.weight", (HIDDEN, heads * DIM), "linear", has_bias=True, attention=shape)
    decisions = decide([qkv, out], model_type=model_type, config=None, preset=None, tp_plan=None, tied={}, world=world)
    reads = torch.arange(heads).repeat_interleave(DIM).expand(HIDDEN, -1).clone()
    for rank in range(world):
        own, own_kv = query_heads(heads, kv, rank, world), kv_heads(heads, kv, rank, world)
        part = shard(rows, decisions[qkv.name].weight, rank, world)
        q, k, v = read(part, as_read, len(own), len(own_kv))
        assert torch.equal(q, owned(0, own)) and torch.equal(k, owned(1, own_kv)) and torch.equal(v, owned(2, own_kv))
        bias = shard(rows[:, 0], decisions[qkv.name].bias, rank, world)
        assert torch.equal(bias, part[:, 0])
        assert shard(reads, decisions[out.name].weight, rank, world)[0, ::DIM].tolist() == list(own)
        assert decisions[out.name].bias.kind == "replicate"


def test_transposed_weights_are_cut_in_their_last_dimension():
    heads = 8
    rows = labelled("stacked", heads, heads)
    shape = AttentionShape(heads, heads, DIM)
    weights = [
        Weight("h.0.attn.c_attn.weight", (HIDDEN, 3 * heads * DIM), "conv1d", has_bias=True, attention=shape),
        Weight("h.0.attn.c_proj.weight", (heads * DIM, HIDDEN), "conv1d", has_bias=True, attention=shape),
        Weight("h.0.mlp.c_fc.weight", (HIDDEN, 6), "conv1d", has_bias=True),
        Weight("h.0.mlp.c_proj.weight", (6, HIDDEN), "conv1d", has_bias=True),
    ]
    decisions = decide(weights, model_type="gpt2", config=None, preset=None, tp_plan=None, tied={}, world=2)
    for rank in range(2):
        part = shard(rows.t().contiguous(), decisions["h.0.attn.c_attn.weight"].weight, rank, 2)
        q, k, v = read(part.t(), "stacked", 4, 4)
        own = range(4 * rank, 4 * rank + 4)
        assert torch.equal(q, owned(0, own)) and torch.equal(k, owned(1, own)) and torch.equal(v, owned(2, own))
        assert torch.equal(shard(rows[:, 0], decisions["h.0.attn.c_attn.weight"].bias, rank, 2), part[0])
    ins = torch.arange(6).unsqueeze(1).expand(-1, HIDDEN)
    assert shard(ins, decisions["h.0.mlp.c_proj.weight"].weight, 1, 2)[:, 0].tolist() == [3, 4, 5]
    assert shard(ins.t(), decisions["h.0.mlp.c_fc.weight"].weight, 1, 2)[0].tolist() == [3, 4, 5]


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_gate_and_up_are_each_cut(kind):
    inner = 6
    shapes = [(2 * inner, HIDDEN), (HIDDEN, inner)]
    weights = [
        Weight(f"layers.0.mlp.{name}.weight", shape if kind == "linear" else shape[::-1], kind)
        for name, shape in zip(("gate_up_proj", "down_proj"), shapes, strict=True)
    ]
    decisions = decide(weights, model_type="phi3", config=None, preset=None, tp_plan=None, tied={}, world=2)
    rows = torch.arange(2 * inner).unsqueeze(1).expand(-1, HIDDEN)
    cut = decisions[weights[0].name].weight
    parts = [shard(rows if kind == "linear" else rows.t(), cut, rank, 2) for rank in range(2)]
    parts = parts if kind == "linear" else [part.t() for part in parts]
    assert [part[:, 0].tolist() for part in parts] == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]


def test_experts_in_one_tensor():
    experts, inner = 3, 4
    names = ["layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"]
    weights = [
        Weight(names[0], (experts, 2 * inner, HIDDEN), "experts"),
        Weight(names[1], (experts, HIDDEN, inner), "experts"),
        Weight("layers.0.mlp.gate.weight", (experts, HIDDEN), "other"),
    ]
    decisions = decide(weights, model_type="mixtral", config=None, preset=None, tp_plan=None, tied={}, world=2)
    assert [decisions[name].style for name in names] == ["experts", "experts"]
    assert [decisions[name].weight.kind for name in names] == ["column", "row"]
    assert (
        decisions["layers.0.mlp.gate.weight"].style == "skip" and not decisions["layers.0.mlp.gate.weight"].sum_gradient
    )
    first = torch.arange(2 * inner).view(1, -1, 1).expand(experts, -1, HIDDEN)
    second = torch.arange(inner).view(1, 1, -1).expand(experts, HIDDEN, -1)
    assert shard(first, decisions[names[0]].weight, 1, 2)[2, :, 0].tolist() == [2, 3, 6, 7]
    assert shard(second, decisions[names[1]].weight, 1, 2)[2, 0].tolist() == [2, 3]


def test_transposed_experts_need_a_plan_that_names_them():
    experts, inner = 3, 4
    names = ["layers.0.feed_forward.experts.gate_up_proj", "layers.0.feed_forward.experts.down_proj"]
    weights = [
        Weight(names[0], (experts, HIDDEN, 2 * inner), "experts"),
        Weight(names[1], (experts, inner, HIDDEN), "experts"),
    ]
    plan = {
        "layers.*.feed_forward.experts.gate_up_proj": "packed_rowwise",
        "layers.*.feed_forward.experts.down_proj": "colwise",
    }
    decisions = decide(weights, model_type="llama4_text", config=None, preset=None, tp_plan=plan, tied={}, world=2)
    last = torch.arange(2 * inner).expand(experts, HIDDEN, -1)
    assert shard(last, decisions[names[0]].weight, 0, 2)[0, 0].tolist() == [0, 1, 4, 5]
    assert shard(last.transpose(1, 2)[:, :inner], decisions[names[1]].weight, 0, 2)[0, :, 0].tolist() == [0, 1]
    assert decisions[names[1]].weight.kind == "row"
    with pytest.raises(ValueError, match="other layouts of experts"):
        decide(weights, model_type="llama4_text", config=None, preset=None, tp_plan=None, tied={}, world=2)


def test_experts_as_rows_of_a_matrix():
    experts, inner = 3, 4
    base = "transformer.blocks.0.ffn"
    weights = [Weight(f"{base}.router.layer.weight", (experts, HIDDEN), "linear")] + [
        Weight(f"{base}.experts.mlp.{name}", (experts * inner, HIDDEN), "experts") for name in ("w1", "v1", "w2")
    ]
    decisions = decide(weights, model_type="dbrx", config=None, preset=None, tp_plan=None, tied={}, world=2)
    rows = torch.arange(experts * inner).unsqueeze(1).expand(-1, HIDDEN)
    for name, kind in (("w1", "column"), ("v1", "column"), ("w2", "row")):
        decision = decisions[f"{base}.experts.mlp.{name}"]
        assert (decision.style, decision.weight.kind) == ("experts", kind)
        assert shard(rows, decision.weight, 1, 2)[:, 0].tolist() == [2, 3, 6, 7, 10, 11]
    assert decisions[f"{base}.router.layer.weight"].style == "skip"
    with pytest.raises(ValueError, match="number of experts is not known"):
        decide(weights[1:], model_type="dbrx", config=None, preset=None, tp_plan=None, tied={}, world=2)


def test_latent_attention_is_cut_by_heads():
    """DeepSeek: q_b and kv_b expand latents to heads of different widths; what gives the latents is whole."""
    heads = 4
    shape = AttentionShape(heads, heads, 12, v_head_dim=8)
    sizes = {
        "q_a_proj": (7, HIDDEN),
        "q_b_proj": (heads * 12, 7),
        "kv_a_proj_with_mqa": (10, HIDDEN),
        "kv_b_proj": (heads * 16, 6),
        "o_proj": (HIDDEN, heads * 8),
    }
    path = "model.layers.0.self_attn"
    weights = [Weight(f"{path}.{name}.weight", size, "linear", attention=shape) for name, size in sizes.items()]
    weights.append(Weight(f"{path}.kv_a_layernorm.weight", (6,), "norm", attention=shape))
    decisions = decide(weights, model_type="deepseek_v2", config=None, preset=None, tp_plan=None, tied={}, world=4)
    for name, width in (("q_b_proj", 12), ("kv_b_proj", 16)):
        rows = torch.arange(heads * width).unsqueeze(1)
        part = shard(rows.expand(-1, sizes[name][1]), decisions[f"{path}.{name}.weight"].weight, 3, 4)
        assert part[:, 0].tolist() == list(range(3 * width, 4 * width))
    assert shard(torch.zeros(sizes["o_proj"]), decisions[f"{path}.o_proj.weight"].weight, 3, 4).shape == (HIDDEN, 8)
    for name in ("q_a_proj", "kv_a_proj_with_mqa", "kv_a_layernorm"):
        assert decisions[f"{path}.{name}.weight"].style == "skip"


@pytest.mark.parametrize(("heads", "kv", "world"), [(2, 2, 4), (3, 1, 4), (1, 1, 2)])
def test_ranks_without_a_head_are_refused(heads, kv, world):
    rows = labelled("stacked", heads, kv)
    shape = AttentionShape(heads, kv, DIM)
    weights = [
        Weight("layers.0.self_attn.qkv_proj.weight", tuple(rows.shape), "linear", attention=shape),
        Weight("layers.0.self_attn.o_proj.weight", (HIDDEN, heads * DIM), "linear", attention=shape),
    ]
    with pytest.raises(ValueError, match=rf"{heads} query heads over {kv} KV heads leave ranks .* without a head"):
        decide(weights, model_type="phi3", config=None, preset=None, tp_plan=None, tied={}, world=world)


def test_wrong_head_counts_are_refused():
    shape = AttentionShape(8, 8, DIM)
    weights = [
        Weight("h.0.self_attention.query_key_value.weight", (10 * DIM, HIDDEN), "linear", attention=shape),
        Weight("h.0.self_attention.dense.weight", (HIDDEN, 8 * DIM), "linear", attention=shape),
    ]
    with pytest.raises(ValueError, match=r"40 output features, but 8 query and 8 KV heads of 4 make 32 \+ 32 \+ 32"):
        decide(weights, model_type="falcon", config=None, preset=None, tp_plan=None, tied={}, world=2)
