"""Every style that a Hugging Face plan may hold, in its old and its new name."""

import pytest

from phalanx.layout import RuleError, Weight, decide
from phalanx.layout.tp_plan import MODULE_STYLES, REFUSED_STYLES, STYLES

PATH = "base.layers.3.block"
WEIGHTS = [
    Weight(f"{PATH}.first.weight", (8, 4), "linear", has_bias=True),
    Weight(f"{PATH}.second.weight", (4, 8), "linear", has_bias=True),
    Weight(f"{PATH}.norm.weight", (4,), "norm"),
    Weight("base.embed_tokens.weight", (9, 4), "embedding"),
    Weight("head.weight", (9, 4), "linear"),
]


def planned(plan):
    return decide(WEIGHTS, model_type=None, config=None, preset=None, tp_plan=plan, tied={}, world=2)


@pytest.mark.parametrize("style", ["colwise", "local_colwise", "packed_colwise", "local_packed_colwise"])
def test_columns(style):
    decision = planned({"layers.*.block.first": style})[f"{PATH}.first.weight"]
    assert (decision.style, decision.bias.kind, decision.gather_output) == ("column", "column", False)
    assert decision.source == f"tp_plan: {style}" and not decision.hand_written


@pytest.mark.parametrize("style", ["colwise_rep", "colwise_gather_output"])
def test_columns_that_are_gathered(style):
    assert planned({"layers.*.block.first": style})[f"{PATH}.first.weight"].gather_output


@pytest.mark.parametrize(
    ("style", "split"),
    [("rowwise", False), ("local_rowwise", False), ("rowwise_rep", True), ("rowwise_split_input", True)],
)
def test_rows(style, split):
    decision = planned({"layers.*.block.second": style})[f"{PATH}.second.weight"]
    assert (decision.style, decision.bias.kind, decision.split_input) == ("row", "replicate", split)


@pytest.mark.parametrize(
    ("style", "summed"),
    [("replicated_with_grad_allreduce", True), ("replicate", False), ("sequence_parallel", False)],
)
def test_replicated(style, summed):
    decision = planned({"layers.*.block.norm": style})[f"{PATH}.norm.weight"]
    assert (decision.style, decision.sum_gradient) == ("skip", summed)


def test_embeddings():
    decisions = planned({"embed_tokens": "embedding_rowwise"})
    assert decisions["base.embed_tokens.weight"].style == "vocab"
    kept = planned({"embed_tokens": "replicate", "layers.*.block.first": "colwise_rep"})
    assert kept["base.embed_tokens.weight"].style == "skip"


@pytest.mark.parametrize(
    "key",
    [
        "layers.*.block.first",
        "base.layers.*.block.first",
        "block.first",
        "layers.*.block.first.weight",
        "layers.3.*.first",
    ],
)
def test_keys_with_and_without_a_prefix(key):
    assert planned({key: "colwise_rep"})[f"{PATH}.first.weight"].style == "column"


@pytest.mark.parametrize("key", ["layers.*.first", "layers.*.block", "model.layers.*.block.first", "ock.first", "irst"])
def test_keys_that_name_something_else(key):
    decisions = planned({key: "colwise_rep"})
    assert decisions[f"{PATH}.first.weight"].style == "skip" and decisions["base.embed_tokens.weight"].style == "vocab"


def test_the_more_specific_key_holds():
    for plan in (
        {"block.first": "replicate", "layers.*.block.first": "colwise_rep"},
        {"layers.*.block.first": "colwise_rep", "block.first": "replicate"},
    ):
        assert planned(plan)[f"{PATH}.first.weight"].style == "column"


def test_styles_of_modules_say_nothing_of_weights():
    plan = {"layers.*.block": "moe_tp_experts", "layers.*.block.first": "gather"}
    assert planned(plan)[f"{PATH}.first.weight"].style == "skip"


@pytest.mark.parametrize("style", ["embedding_colwise", "grouped_gemm", "ep_dispatch_experts", "ep_router"])
def test_styles_that_are_refused(style):
    with pytest.raises(RuleError, match=f"tp_plan style '{style}' of 'layers.*.block.first'"):
        planned({"layers.*.block.first": style})


def test_unknown_styles():
    with pytest.raises(RuleError, match=r"unknown tp_plan style 'colwize' of 'x' \(did you mean 'colwise'"):
        planned({"x": "colwize"})


def test_a_packed_plan_of_something_else_than_experts_is_refused():
    with pytest.raises(RuleError, match="experts in one tensor only"):
        planned({"layers.*.block.first": "packed_rowwise"})


def test_all_styles_of_transformers_are_known():
    try:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
    except ImportError:
        from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES
    assert set(ALL_PARALLEL_STYLES.keys()) <= {*STYLES, *MODULE_STYLES, *REFUSED_STYLES}
