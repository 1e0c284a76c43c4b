"""Which rule decides, what follows for the weights beside it, and what is refused."""

import re

import pytest
import torch

from phalanx.layout import AttentionShape, LayerSpec, PartitionConfig, RuleError, Weight, decide, shard

HIDDEN, VOCAB = 8, 11
SHAPE = AttentionShape(4, 2, 2)
LAYER = "model.layers.0"


def llama(*, q_norm=(), layers=1):
    """The weights of a small llama; `q_norm`: the shape of norms of Q and K, if there are any."""
    weights = [Weight("model.embed_tokens.weight", (VOCAB, HIDDEN), "embedding")]
    for index in range(layers):
        path = f"model.layers.{index}"
        for name, size in {"q": (8, HIDDEN), "k": (4, HIDDEN), "v": (4, HIDDEN), "o": (HIDDEN, 8)}.items():
            weights.append(Weight(f"{path}.self_attn.{name}_proj.weight", size, "linear", attention=SHAPE))
        for name in ("q_norm", "k_norm") if q_norm else ():
            weights.append(Weight(f"{path}.self_attn.{name}.weight", q_norm, "norm", attention=SHAPE))
        for name, size in {"gate": (6, HIDDEN), "up": (6, HIDDEN), "down": (HIDDEN, 6)}.items():
            weights.append(Weight(f"{path}.mlp.{name}_proj.weight", size, "linear"))
        weights.append(Weight(f"{path}.input_layernorm.weight", (HIDDEN,), "norm"))
    return [*weights, Weight("lm_head.weight", (VOCAB, HIDDEN), "linear")]


NEOX_SHAPE = AttentionShape(4, 4, 2)
NEOX = [
    Weight("gpt_neox.layers.0.attention.query_key_value.weight", (24, HIDDEN), "linear", True, NEOX_SHAPE),
    Weight("gpt_neox.layers.0.attention.dense.weight", (HIDDEN, 8), "linear", True, NEOX_SHAPE),
]


def rules(*specs, **options):
    return PartitionConfig.from_dict({"layer_specs": list(specs), **options})


def spec(pattern, kind="column", **options):
    return {"patterns": [pattern], "partition_type": kind, **options}


ATTENTION = (spec(r".*\.[qkv]_proj\.weight$"), spec(r".*\.o_proj\.weight$", "row"))
MLP = (spec(r".*\.(up|gate)_proj\.weight$"), spec(r".*\.down_proj\.weight$", "row"))


def decided(weights, config=None, *, preset=None, plan=None, tied=None, world=2, model_type="llama"):
    return decide(
        weights, model_type=model_type, config=config, preset=preset, tp_plan=plan, tied=tied or {}, world=world
    )


def styles(decisions):
    """{last two parts of the module's name: style}."""
    return {".".join(name.removesuffix(".weight").split(".")[-2:]): each.style for name, each in decisions.items()}


def problems(*args, **options):
    with pytest.raises(RuleError) as caught:
        decided(*args, **options)
    return caught.value.problems


def test_the_users_rules_decide_alone():
    decisions = decided(llama(), rules(*ATTENTION))
    assert styles(decisions) == {
        "self_attn.q_proj": "column", "self_attn.k_proj": "column", "self_attn.v_proj": "column",
        "self_attn.o_proj": "row", "mlp.gate_proj": "skip", "mlp.up_proj": "skip", "mlp.down_proj": "skip",
        "0.input_layernorm": "skip", "model.embed_tokens": "skip", "lm_head": "skip",
    }  # fmt: skip
    q = decisions[f"{LAYER}.self_attn.q_proj.weight"]
    assert q.hand_written and q.source == r"layer_specs[0]: '.*\\.[qkv]_proj\\.weight$'"
    assert not decisions["lm_head.weight"].hand_written


def test_the_first_spec_that_matches_decides():
    config = rules(spec(r".*mlp\.", "skip"), *MLP, *ATTENTION)
    assert styles(decided(llama(), config))["mlp.up_proj"] == "skip"


def test_specs_for_other_model_types_do_not_count():
    other = spec(r".*no_such_name", model_types=["bloom"])
    assert styles(decided(llama(), rules(other, *ATTENTION)))["self_attn.q_proj"] == "column"
    only_neox = spec(r".*\.[qkv]_proj\.weight$", "skip", model_types=["gpt_neox"])
    assert styles(decided(llama(), rules(only_neox, *ATTENTION)))["self_attn.q_proj"] == "column"
    assert problems(llama(), rules(only_neox))[0].startswith("2 ranks were asked for, but nothing")


def test_a_preset_stands_after_the_users_rules():
    own = spec(r".*mlp\.", "skip")
    merged = decided(llama(), rules(own), preset="LLAMA")
    assert styles(merged)["mlp.up_proj"] == "skip" and styles(merged)["self_attn.o_proj"] == "row"
    assert merged[f"{LAYER}.self_attn.o_proj.weight"].source == "preset LLAMA"
    assert not merged[f"{LAYER}.self_attn.o_proj.weight"].hand_written
    alone = decided(llama(), rules(*MLP, use_default_specs=False), preset="llama")
    assert styles(alone)["self_attn.o_proj"] == "skip" and styles(alone)["mlp.up_proj"] == "column"
    assert styles(decided(llama(), preset="llama"))["lm_head"] == "skip"


def test_a_plan_is_for_those_who_give_no_rules_and_structure_fills_it_up():
    plan = {"layers.*.mlp.up_proj": "replicate", "layers.*.mlp.gate_proj": "replicate", "lm_head": "colwise_rep"}
    planned = decided(llama(), plan=plan)
    assert styles(planned)["mlp.up_proj"] == "skip" and styles(planned)["self_attn.q_proj"] == "column"
    assert planned["lm_head.weight"].source == "tp_plan: colwise_rep"
    assert planned["model.embed_tokens.weight"].source == "structure"
    assert planned["lm_head.weight"].style == planned["model.embed_tokens.weight"].style == "vocab"
    assert planned["lm_head.weight"].gather_output and not planned["model.embed_tokens.weight"].gather_output
    assert styles(decided(llama(), rules(*MLP), plan=plan))["mlp.up_proj"] == "column"


def test_a_config_without_specs_is_none():
    for empty in (rules(), rules(use_default_specs=True, tp_size=2), rules(use_default_specs=False)):
        assert decided(llama(), empty) == decided(llama())


def test_one_rank_cuts_nothing():
    assert set(styles(decided(llama(), rules(*ATTENTION), world=1)).values()) == {"skip"}


def test_separate_projections_go_by_whole_heads():
    """3 KV heads over 2 ranks are 2 and 1, with the 2 query heads of each."""
    shape = AttentionShape(6, 3, 2)
    sizes = {"q_proj": (12, HIDDEN), "k_proj": (6, HIDDEN), "v_proj": (6, HIDDEN), "o_proj": (HIDDEN, 12)}
    weights = [Weight(f"{LAYER}.self_attn.{n}.weight", s, "linear", attention=shape) for n, s in sizes.items()]
    for config in (None, rules(*ATTENTION)):
        decisions = decided(weights, config)
        sizes_of = {
            name: [tuple(shard(torch.zeros(w.shape), decisions[w.name].weight, rank, 2).shape) for rank in range(2)]
            for name, w in zip(sizes, weights, strict=True)
        }
        assert sizes_of == {
            "q_proj": [(8, HIDDEN), (4, HIDDEN)], "k_proj": [(4, HIDDEN), (2, HIDDEN)],
            "v_proj": [(4, HIDDEN), (2, HIDDEN)], "o_proj": [(HIDDEN, 8), (HIDDEN, 4)],
        }  # fmt: skip


def test_a_gate_of_attention_goes_with_the_query_heads():
    gate = Weight(f"{LAYER}.self_attn.g_proj.weight", (4, HIDDEN), "linear", attention=SHAPE)
    cut = decided([*llama(), gate])[gate.name].weight
    assert shard(torch.arange(4).unsqueeze(1), cut, 1, 4)[:, 0].tolist() == [1]


def test_a_query_projection_may_hold_a_gate_in_each_head():
    weights = [w if "q_proj" not in w.name else Weight(w.name, (16, HIDDEN), "linear", False, SHAPE) for w in llama()]
    decisions = decided(weights)
    q, o = (decisions[f"{LAYER}.self_attn.{name}_proj.weight"] for name in "qo")
    assert shard(torch.arange(16).unsqueeze(1), q.weight, 1, 4)[:, 0].tolist() == [4, 5, 6, 7]
    assert shard(torch.arange(8).unsqueeze(0), o.weight, 1, 4)[0].tolist() == [2, 3]


def test_column_says_that_a_fused_weight_is_cut_and_the_family_how():
    config = rules(spec(r".*query_key_value\.weight$"), spec(r".*attention\.dense\.weight$", "row"))
    decisions = decided(NEOX, config, model_type="gpt_neox")
    rows = torch.arange(24).unsqueeze(1)
    # Head-major: rank 1 has heads 2 and 3, 3 x 2 rows each.
    assert shard(rows, decisions[NEOX[0].name].weight, 1, 2)[:, 0].tolist() == list(range(12, 24))
    assert "laid out as in gpt_neox" in decisions[NEOX[0].name].source
    assert decisions[NEOX[0].name].bias == decisions[NEOX[0].name].weight
    assert decisions[NEOX[1].name].bias.kind == "replicate"


def test_an_unknown_fused_layout_is_not_guessed():
    assert "no known" not in str(problems(NEOX, model_type="something_else"))
    mlp = [Weight("h.0.mlp.fc1.weight", (6, HIDDEN), "linear"), Weight("h.0.mlp.fc2.weight", (HIDDEN, 6), "linear")]
    decisions = decided([*NEOX, *mlp], model_type="something_else")
    assert decisions[NEOX[0].name].style == decisions[NEOX[1].name].style == "skip"
    assert "layout of its QKV projection is not known" in decisions[NEOX[0].name].source
    assert decisions["h.0.mlp.fc1.weight"].style == "column"


@pytest.mark.parametrize("with_plan", [False, True])
def test_what_is_not_understood_keeps_attention_whole_in_all_layers(with_plan):
    sink = Weight("model.layers.1.self_attn.sinks", (4,), "other", attention=SHAPE)
    plan = {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.sinks": "colwise"} if with_plan else None
    decisions = decided([*llama(layers=2), sink], plan=plan)
    assert decisions[f"{LAYER}.self_attn.q_proj.weight"].style == "skip"
    assert "self_attn.sinks is not understood" in decisions[f"{LAYER}.self_attn.q_proj.weight"].source
    assert decisions[f"{LAYER}.mlp.up_proj.weight"].style == "column"


@pytest.mark.parametrize("config", [None, rules(*ATTENTION), rules(*ATTENTION, spec(".*_norm", "skip"))])
def test_norms_of_heads_sum_their_gradients_where_attention_is_cut(config):
    decisions = decided(llama(q_norm=(2,)), config)
    for name in ("q_norm", "k_norm"):
        assert decisions[f"{LAYER}.self_attn.{name}.weight"].style == "skip"
        assert decisions[f"{LAYER}.self_attn.{name}.weight"].sum_gradient
    assert not decisions[f"{LAYER}.input_layernorm.weight"].sum_gradient


def test_norms_of_heads_do_not_sum_where_attention_is_whole():
    norm = spec(".*_norm", "skip", grad_allreduce=True)
    decisions = decided(llama(q_norm=(2,)), rules(norm, *MLP))
    assert not decisions[f"{LAYER}.self_attn.q_norm.weight"].sum_gradient


@pytest.mark.parametrize("norm", [(8,), (4, 2)])
def test_norms_that_see_all_heads_make_attention_whole(norm):
    for options in ({}, {"plan": {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}}):
        decisions = decided(llama(q_norm=norm), **options)
        for name in "qkv":
            assert decisions[f"{LAYER}.self_attn.{name}_proj.weight"].gather_output
        o = decisions[f"{LAYER}.self_attn.o_proj.weight"]
        assert o.style == "row" and o.split_input
        assert not decisions[f"{LAYER}.self_attn.q_norm.weight"].sum_gradient
    assert "set 'gather_output' for Q, K and V" in problems(llama(q_norm=norm), rules(*ATTENTION))[0]
    gathered = rules(spec(r".*\.[qkv]_proj\.weight$", gather_output=True), ATTENTION[1])
    assert decided(llama(q_norm=norm), gathered)[f"{LAYER}.self_attn.o_proj.weight"].split_input


def test_norms_between_cut_projections_are_refused():
    wide = Weight(f"{LAYER}.mlp.ffn_norm.weight", (6,), "norm")
    assert "norms all features that" in problems([*llama(), wide], rules(*MLP))[0]
    assert decided([*llama(), wide])[f"{LAYER}.mlp.up_proj.weight"].style == "skip"


def test_parameters_of_an_activation_inside_sum_their_gradients():
    inside = Weight(f"{LAYER}.mlp.act_fn.alpha", (), "other")
    assert decided([*llama(), inside])[inside.name].sum_gradient
    assert not decided([*llama(), inside], rules(*ATTENTION))[inside.name].sum_gradient


TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize("listed", [True, False])
def test_tied_weights_are_both_cut_or_neither(listed):
    weights = llama() if listed else llama()[:-1]
    both = ("model.embed_tokens.weight", "lm_head.weight")

    def kinds(config=None, plan=None):
        return [decided(weights, config, plan=plan, tied=TIED)[name].style for name in both]

    assert kinds() == kinds(plan={"lm_head": "colwise_rep"}) == ["vocab", "vocab"]
    assert kinds(rules(spec(r"lm_head\.weight$"))) == ["vocab", "vocab"]
    assert kinds(rules(spec(r".*embed_tokens", "vocab"))) == ["vocab", "vocab"]
    assert kinds(rules(*ATTENTION)) == ["skip", "skip"]
    head = decided(weights, tied=TIED)["lm_head.weight"]
    assert head.gather_output and head.weight.kind == "vocab"


def test_a_users_skip_keeps_tied_weights_whole():
    config = rules(spec(r".*embed_tokens", "skip"), spec(r"lm_head"), *MLP)
    decisions = decided(llama(), config, tied=TIED)
    assert decisions["lm_head.weight"].style == decisions["model.embed_tokens.weight"].style == "skip"


def test_a_head_that_shares_its_bias_stays_whole():
    weights = [
        Weight("bert.embeddings.word_embeddings.weight", (VOCAB, HIDDEN), "embedding"),
        Weight("bert.mlp.up_proj.weight", (6, HIDDEN), "linear"),
        Weight("bert.mlp.down_proj.weight", (HIDDEN, 6), "linear"),
    ]
    tied = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    decisions = decided(weights, tied=tied)
    assert decisions["cls.predictions.decoder.weight"].style == "skip"
    assert decisions["bert.embeddings.word_embeddings.weight"].style == "skip"
    del tied["cls.predictions.decoder.bias"]
    assert decided(weights, tied=tied)["cls.predictions.decoder.weight"].style == "vocab"


def test_an_output_head_is_cut_by_the_vocabulary():
    decisions = decided(llama(), rules(spec(r"lm_head\.weight$")))
    head = decisions["lm_head.weight"]
    assert head.style == "vocab" and head.gather_output and decisions["model.embed_tokens.weight"].style == "skip"
    shares = [shard(torch.zeros(VOCAB, HIDDEN), head.weight, rank, 2).shape[0] for rank in range(2)]
    assert shares == [6, 5]
    odd = [Weight("proj_to_vocabulary.weight", (VOCAB, HIDDEN), "linear", has_bias=True)]
    named = rules(spec(r"proj_to"), lm_head_patterns=["to_vocab"])
    assert decided(odd, named)["proj_to_vocabulary.weight"].style == "vocab"
    assert decided(odd, named)["proj_to_vocabulary.weight"].bias.kind == "vocab"


def test_row_reads_a_whole_input_where_nothing_before_it_is_cut():
    decisions = decided(llama(), rules(spec(r".*\.down_proj\.weight$", "row")))
    down = decisions[f"{LAYER}.mlp.down_proj.weight"]
    assert down.style == "row" and down.split_input


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (rules(spec(r".*q_prj\.weight$"), *MLP), r"q_prj.* matches no weight .* the nearest are model.layers.\*"),
        (rules(spec(r".*self_attn.qproj"), *MLP), r"nearest are model\.layers\.\*\.self_attn\.q_proj"),
        (rules(spec(r"transformer\.h\.0"), *MLP), "matches no weight"),
        (rules(spec(r".*norm.*"), *MLP), "matches no weight that it could cut"),
        (rules(spec(r".*embed_tokens\.weight$")), "it is an embedding .* 'column' would cut its hidden size"),
        (rules(spec(r".*embed_tokens\.weight$", "row")), "'row' would cut its hidden size"),
        (rules(spec(r".*lm_head\.weight$", "row")), "it projects hidden states to the vocabulary"),
        (rules(spec(r".*lm_head\.weight$", shape=[2, -1])), "cut by its vocabulary"),
        (rules(spec(r".*[qkv]_proj\.weight$", "row")), "it projects hidden states into attention"),
        (rules(spec(r".*up_proj\.weight$", "row"), *ATTENTION), "it projects hidden states into the MLP"),
        (rules(spec(r".*[qkvo]_proj\.weight$")), "leaves each rank a part of the output"),
        (rules(spec(r".*[qk]_proj\.weight$"), *MLP), "is cut, but .*v_proj.* gives its whole output"),
        (rules(spec(r".*[qkv]_proj\.weight$"), *MLP), "o_proj.* is not cut, but it reads the cut output"),
        (rules(spec(r".*(up|gate)_proj\.weight$")), "down_proj.* is not cut, but it reads the cut output"),
        (
            rules(spec(r".*(up|gate)_proj\.weight$", shape=[[4, 2], -1]), MLP[1]),
            r"features 0\.\.1, 4\.\.4, but .* 0\.\.2",
        ),
        (
            rules(spec(r".*gate_proj\.weight$", shape=[[3, 3], -1]), *MLP),
            "gate_proj.* but .*down_proj.* reads 0..2: cut them alike",
        ),
        (
            rules(spec(r".*q_proj\.weight$", shape=[[4, 4], -1]), *ATTENTION),
            "q_proj.* but .*o_proj.* reads 0..3: cut them alike",
        ),
        (rules(spec(r".*up_proj\.weight$", shape=[5, -1]), *MLP), "6 elements are not 5 equal"),
        (rules(spec(r".*mlp.*", "vocab"), *ATTENTION), "an embedding or an output head, which it is not"),
        (rules(*MLP, strict_mode=True), "no matching spec for lm_head.weight, which strict_mode"),
        (rules(*MLP, tp_size=4), "says tp_size 4, but there are 2 ranks"),
        (rules(strict_mode=True), "no matching spec for model.embed_tokens.weight"),
        (rules(tp_size=4), "says tp_size 4, but there are 2 ranks"),
    ],
)
def test_faults(config, problem):
    found = problems(llama(layers=3), config)
    assert any(re.search(problem, each) for each in found), found


def test_a_fault_of_all_layers_is_told_once_and_all_kinds_are_told():
    config = rules(spec(r".*up_proj\.weight$", "row"), spec(r".*embed"), spec("nothing"))
    found = problems(llama(layers=5), config)
    assert len(found) == 3


def test_strict_mode_accepts_a_whole_config():
    rest = spec(r".*(embed_tokens|lm_head)", "skip")
    assert styles(decided(llama(), rules(*ATTENTION, *MLP, rest, strict_mode=True)))["lm_head"] == "skip"


@pytest.mark.parametrize("name", ["codegen", "yuan", "gpt_oss"])
def test_families_that_cannot_be_cut_are_refused_by_name(name):
    assert f"models of type '{name}' cannot be cut" in problems(llama(), model_type=name)[0]
    assert f"there is no preset '{name}'" in problems(llama(), preset=name)[0]


def test_unknown_presets_are_refused():
    found = problems(llama(), preset="lama")
    assert found[0].startswith("unknown preset 'lama' (did you mean 'llama'")


def test_world_must_be_positive():
    with pytest.raises(ValueError, match="world must be at least 1"):
        decided(llama(), world=0)


def test_specs_can_be_made_without_json():
    config = PartitionConfig((LayerSpec((r".*\.[qkv]_proj\.weight$",)), LayerSpec((r".*\.o_proj\.weight$",), "row")))
    assert config == rules(*ATTENTION)
    assert styles(decided(llama(), config))["self_attn.k_proj"] == "column"


def adapted(weights, rank=2):
    """The weights as PEFT names them, with a low-rank adapter beside each projection."""
    result = []
    for weight in weights:
        name = f"base_model.model.{weight.name}"
        if weight.kind != "linear" or "lm_head" in name:
            result.append(Weight(name, weight.shape, weight.kind, weight.has_bias, weight.attention))
            continue
        module = name.removesuffix(".weight")
        out, ins = weight.shape
        for part, shape in {
            "base_layer": (out, ins),
            "lora_A.default": (rank, ins),
            "lora_B.default": (out, rank),
        }.items():
            result.append(Weight(f"{module}.{part}.weight", shape, "linear", False, weight.attention))
    return result


@pytest.mark.parametrize(
    "options",
    [{}, {"plan": {"layers.*.self_attn.q_proj": "colwise"}}, {"config": rules(*ATTENTION, *MLP)}, {"preset": "llama"}],
)
def test_adapters_are_cut_as_the_weights_that_they_change(options):
    """Column: factor B is cut as the weight, A is whole. Row: A is cut as the weight, B is whole."""
    whole = decided(llama(), **options)
    decisions = decided(adapted(llama()), **options)
    for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "self_attn.o_proj", "mlp.down_proj"):
        base = whole[f"{LAYER}.{module}.weight"]
        parts = [
            decisions[f"base_model.model.{LAYER}.{module}.{part}.weight"]
            for part in ("base_layer", "lora_A.default", "lora_B.default")
        ]
        cut, kept = (parts[1], parts[2]) if base.style == "row" else (parts[2], parts[1])
        assert parts[0].weight == cut.weight == base.weight and cut.style == base.style
        assert kept.style == "skip" and not kept.sum_gradient


def test_a_vision_tower_with_other_heads_stays_whole():
    path = "vision.layers.0.self_attn"
    sizes = {"q_proj": (24, 6), "k_proj": (24, 6), "v_proj": (24, 6), "out_proj": (6, 24)}
    tower = [Weight(f"{path}.{name}.weight", size, "linear", attention=SHAPE) for name, size in sizes.items()]
    decisions = decided([*llama(), *tower])
    assert {decisions[each.name].style for each in tower} == {"skip"}
    assert decisions[f"{LAYER}.self_attn.q_proj.weight"].style == "column"
    config = rules(spec(r"vision.*\.[qkv]_proj"), spec(r"vision.*\.out_proj", "row"))
    assert "24 output features, but 2 KV heads of 2" in problems([*llama(), *tower], config)[0]


def test_unknown_heads_must_divide():
    weights = [Weight(w.name, w.shape, w.kind) for w in llama() if "self_attn" in w.name]
    assert decided(weights, rules(*ATTENTION))[f"{LAYER}.self_attn.k_proj.weight"].style == "column"
    assert "its heads are not known" in problems(weights, rules(*ATTENTION), world=3)[0]


def test_a_value_a_head_inside_a_cut_attention_is_refused():
    sink = Weight(f"{LAYER}.self_attn.sinks", (4,), "other", attention=SHAPE)
    scalar = Weight(f"{LAYER}.self_attn.scale", (), "other", attention=SHAPE)
    assert decided([*llama(), scalar], rules(*ATTENTION))[scalar.name].style == "skip"
    assert "holds a value a head" in problems([*llama(), sink], rules(*ATTENTION))[0]
