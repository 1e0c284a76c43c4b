"""Configs are read whole: what they say is kept, and every fault is named at once."""

import pytest

from phalanx.layout import LayerSpec, PartitionConfig, RuleError

O_PROJ = r".*\.o_proj\.weight$"


def test_a_config_as_people_write_it():
    config = PartitionConfig.from_dict(
        {
            "use_default_specs": False,
            "strict_mode": True,
            "tp_size": 2,
            "embedding_partition_dim": 1,
            "layer_specs": [
                {"patterns": [O_PROJ, r".*\.down_proj\.weight$"], "partition_type": "ROW"},
                {"patterns": [".*qkv"], "shape": [[8, 4, 4], -1], "partition_dim": 0, "model_types": ["Phi3"]},
                {"patterns": [".*query_key_value"], "view": [4, 3, -1], "axis": 0},
                {"patterns": [".*lm_head"], "gather_output": True},
                {"patterns": [".*norm"], "partition_type": "skip", "grad_allreduce": True, "shape": None},
            ],
        }
    )
    row, shaped, viewed, head, norm = config.layer_specs
    assert row.partition_type == "row" and row.patterns == (O_PROJ, r".*\.down_proj\.weight$")
    assert shaped.shape == ((8, 4, 4), -1) and shaped.cut_dim == 0 and shaped.partition_type == "column"
    assert shaped.holds_for("phi3") and not shaped.holds_for("llama") and not shaped.holds_for(None)
    assert row.holds_for("llama") and row.holds_for(None)
    assert viewed.view == (4, 3, -1) and viewed.axis == 0
    assert head.gather_output and norm.grad_allreduce
    assert (config.use_default_specs, config.strict_mode, config.tp_size) == (False, True, 2)


def test_defaults():
    config = PartitionConfig.from_dict({})
    assert config == PartitionConfig() and config.use_default_specs and not config.strict_mode
    assert config.lm_head_patterns == ("lm_head", "embed_out")
    spec = LayerSpec.from_dict({"patterns": ["x"]})
    assert spec == LayerSpec(("x",)) and spec.partition_type == "column" and spec.cut_dim == 0
    assert LayerSpec(("x",), "row", shape=(-1, (2, 3))).cut_dim == 1


def test_patterns_match_from_the_start_of_the_name():
    spec = LayerSpec((r"model\.layers\.\d+\.mlp", O_PROJ))
    assert spec.matching("model.layers.3.self_attn.o_proj.weight") == O_PROJ
    assert spec.matching("model.layers.3.mlp.up_proj.weight") == r"model\.layers\.\d+\.mlp"
    assert spec.matching("x.model.layers.3.mlp.up_proj.weight") is None
    assert LayerSpec((r".*experts\.down_proj\.weight$",)).matching("layers.0.mlp.experts.down_proj")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (
            {"patterns": [O_PROJ], "partition_tipe": "row"},
            "unknown key 'partition_tipe' .did you mean 'partition_type'",
        ),
        ({"patterns": []}, "at least one"),
        ({}, "at least one"),
        ({"patterns": O_PROJ}, "must be a list of regular expressions"),
        ({"patterns": ["("]}, "is not a regular expression"),
        ({"patterns": [3]}, "is not a regular expression"),
        ({"patterns": ["x"], "partition_type": "rows"}, "unknown partition_type 'rows' .did you mean 'row'"),
        ({"patterns": ["x"], "partition_type": 1}, "'partition_type' must be one of"),
        ({"patterns": ["x"], "gather_output": "yes"}, "'gather_output' must be true or false"),
        ({"patterns": ["x"], "partition_dim": 0.5}, "'partition_dim' must be a whole number"),
        ({"patterns": ["x"], "partition_dim": 2}, "partition_dim 2 is not a dimension"),
        ({"patterns": ["x"], "partition_type": "row", "partition_dim": 0}, "computes another function"),
        ({"patterns": ["x"], "partition_type": "row", "partition_dim": 0, "shape": [3, -1]}, "another function"),
        ({"patterns": ["x"], "partition_type": "column", "partition_dim": 1}, "is the input features"),
        ({"patterns": ["x"], "shape": [3, -1], "partition_dim": 2}, "outside of shape"),
        ({"patterns": ["x"], "shape": [3, -1], "partition_dim": -1}, "outside of shape"),
        ({"patterns": ["x"], "shape": [3]}, "at least two dimensions"),
        ({"patterns": ["x"], "shape": "3,-1"}, "'shape' must be a list"),
        ({"patterns": ["x"], "shape": [3, [1, 2], -1]}, "may stand at partition_dim 0 only"),
        ({"patterns": ["x"], "shape": [[4, [2]], -1]}, "sizes must be positive whole numbers"),
        ({"patterns": ["x"], "shape": [[], -1]}, "sizes must be positive whole numbers"),
        ({"patterns": ["x"], "shape": [[4, -1], -1]}, "sizes must be positive whole numbers"),
        ({"patterns": ["x"], "shape": [0, -1]}, "must be -1 or a positive whole number"),
        ({"patterns": ["x"], "shape": [3.5, -1]}, "must be -1 or a positive whole number"),
        ({"patterns": ["x"], "shape": [3, -1], "gather_output": True}, "cannot be combined"),
        ({"patterns": ["x"], "shape": [3, -1], "view": [3, 4]}, "either 'shape' or 'view'"),
        ({"patterns": ["x"], "shape": [3, -1], "partition_type": "skip"}, "takes neither"),
        ({"patterns": ["x"], "view": [3, 4], "partition_type": "row"}, "'row' does not cut"),
        ({"patterns": ["x"], "view": [-1, 3, -1]}, "-1 at most once"),
        ({"patterns": ["x"], "view": [3, 4], "axis": 2}, "axis 2 is outside"),
        ({"patterns": ["x"], "view": [3, 4], "partition_dim": 0}, "use 'axis'"),
        ({"patterns": ["x"], "axis": 0}, "which is missing"),
        ({"patterns": ["x"], "model_types": "llama"}, "'model_types' must be a list"),
        ({"patterns": ["x"], "model_types": [1]}, "'model_types' must be a list of names"),
        ({"patterns": ["x"], "partition_type": "row", "gather_output": True}, "'gather_output' is for"),
        ({"patterns": ["x"], "grad_allreduce": True}, "'grad_allreduce' is for"),
        ("x", "must be an object"),
    ],
)
def test_faults_of_a_spec(spec, problem):
    with pytest.raises(RuleError, match=problem):
        LayerSpec.from_dict(spec)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"layer_spec": []}, "unknown key 'layer_spec' .did you mean 'layer_specs'"),
        ({"layer_specs": {}}, "layer_specs must be a list"),
        ({"strict_mode": 1}, "'strict_mode' must be true or false"),
        ({"tp_size": 0}, "tp_size must be a positive whole number"),
        ({"embedding_partition_dim": 0}, "partition_type 'vocab'"),
        ({"lm_head_patterns": "lm_head"}, "lm_head_patterns must be a list"),
        ([], "must be an object"),
    ],
)
def test_faults_of_a_config(config, problem):
    with pytest.raises(RuleError, match=problem):
        PartitionConfig.from_dict(config)


def test_all_faults_are_told_at_once():
    with pytest.raises(RuleError) as caught:
        PartitionConfig.from_dict(
            {"strickt_mode": True, "layer_specs": [{"patterns": ["("], "shape": [1]}, {"patern": ["x"]}]}
        )
    assert len(caught.value.problems) == 4
    assert [p.split(":")[0] for p in caught.value.problems] == [
        "partition_config", "layer_specs[0]", "layer_specs[0]", "layer_specs[1]",
    ]  # fmt: skip
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    assert isinstance(caught.value, ValueError)
