"""`shape` and `view` mean the rows that people wrote down: each rank's share is counted out by hand."""

import pytest
import torch

from phalanx.layout import AttentionShape, LayerSpec, Weight, shard
from phalanx.layout.shapes import declared_cut


def rows_of(spec, out, world, ins=3, kind="linear", attention=None):
    """The output features that each rank gets of a weight of `out` features."""
    weight = Weight("w.weight", (out, ins) if kind == "linear" else (ins, out), kind, attention=attention)
    rows = torch.arange(out).unsqueeze(1).expand(-1, ins)
    cut = declared_cut(weight, LayerSpec(("x",), **spec))
    parts = [shard(rows if kind == "linear" else rows.t(), cut, rank, world) for rank in range(world)]
    return [(part[:, 0] if kind == "linear" else part[0]).tolist() for part in parts]


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize(
    ("spec", "out", "shares"),
    [
        # Counts of equal sub-parameters.
        ({"shape": (2, -1)}, 8, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ({"shape": (3, -1)}, 6, [[0, 2, 4], [1, 3, 5]]),
        ({"shape": (1, -1)}, 4, [[0, 1], [2, 3]]),
        ({"shape": (-1, 3)}, 4, [[0, 1], [2, 3]]),
        # The whole size is one sub-parameter, not as many as it has elements.
        ({"shape": (4, 3)}, 4, [[0, 1], [2, 3]]),
        # Sizes, uneven ones: the first ranks get one more.
        ({"shape": ((4, 2, 2), -1)}, 8, [[0, 1, 4, 6], [2, 3, 5, 7]]),
        ({"shape": ((3, 2), 3)}, 5, [[0, 1, 3], [2, 4]]),
        # More dimensions: (2, 4) and (4, 2), cut at one or the other.
        ({"shape": (2, -1, 3), "partition_dim": 1}, 8, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ({"shape": (-1, 2, 3), "partition_dim": 0}, 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"shape": (2, (2, 2), -1), "partition_dim": 1}, 8, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ({"view": (4, 2), "axis": 0}, 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"view": (2, -1), "axis": 1}, 8, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ({"view": (2, 2, 2), "axis": 2}, 8, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ({"view": (8,)}, 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_output_features(spec, out, shares, kind):
    assert rows_of(spec, out, 2, kind=kind) == shares


def test_input_features():
    weight = Weight("w.weight", (3, 6), "linear")
    columns = torch.arange(6).expand(3, -1)

    def shares(shape):
        cut = declared_cut(weight, LayerSpec(("x",), "row", shape=shape))
        return [shard(columns, cut, rank, 2)[0].tolist() for rank in range(2)]

    assert shares((-1, -1)) == shares((3, 6)) == [[0, 1, 2], [3, 4, 5]]
    assert shares((-1, (4, 2))) == [[0, 1, 4], [2, 3, 5]]
    assert shares((-1, 3)) == [[0, 2, 4], [1, 3, 5]]


def test_experts_are_cut_inside():
    weight = Weight("mlp.experts.gate_up_proj", (2, 4, 3), "experts")
    cut = declared_cut(weight, LayerSpec(("x",), shape=(2, (2, 2), -1), partition_dim=1))
    rows = torch.arange(8).view(2, 4, 1).expand(-1, -1, 3)
    assert shard(rows, cut, 0, 2)[:, :, 0].tolist() == [[0, 2], [4, 6]]


def test_sizes_of_heads_follow_the_heads():
    """With 3 KV heads over 2 ranks the query heads go with them: 4 and 2 of 6, not 3 and 3."""
    attention = AttentionShape(6, 3, 1)
    assert rows_of({"shape": ((6, 3, 3), -1)}, 12, 2, attention=attention) == [
        [0, 1, 2, 3, 6, 7, 9, 10],
        [4, 5, 8, 11],
    ]
    # One KV head is copied to both.
    assert rows_of({"shape": ((2, 1, 1), -1)}, 4, 2, attention=AttentionShape(2, 1, 1)) == [[0, 2, 3], [1, 2, 3]]
    # Heads stay whole in a grid of heads, too.
    grid = {"view": (6, 3, 2), "axis": 0}
    assert [len(part) for part in rows_of(grid, 36, 4, attention=AttentionShape(6, 6, 2))] == [12, 12, 6, 6]


def test_the_published_shape_of_a_head_major_weight_is_taken_as_stacked():
    """What was declared is cut; that the model means another layout is for verification to find."""
    attention = AttentionShape(2, 2, 2)
    stacked = [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert rows_of({"shape": ((4, 4, 4), -1)}, 12, 2, attention=attention) == stacked
    assert rows_of({"shape": (3, -1)}, 12, 2, attention=attention) == stacked
    head_major = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert rows_of({"view": (2, 3, 2), "axis": 0}, 12, 2, attention=attention) == head_major


@pytest.mark.parametrize(
    ("spec", "out", "problem"),
    [
        ({"shape": (3, -1)}, 8, "8 elements are not 3 equal sub-parameters"),
        ({"shape": ((4, 2), -1)}, 8, r"shape \[\[4, 2\], -1\] does not fit the 8 output features"),
        ({"shape": (2, 5)}, 8, "ends in 5, but the weight has 3 input features"),
        ({"shape": (3, -1, 3), "partition_dim": 1}, 8, "does not fit the 8 output features"),
        ({"shape": (-1, -1, 3), "partition_dim": 1}, 8, "more than one output dimension open"),
        ({"shape": (2, -1, -1), "partition_dim": 0}, 8, "more than one output dimension open"),
        ({"view": (3, -1)}, 8, r"view \[3, -1\] does not fit the 8 output features"),
        ({"view": (2, 3)}, 8, r"view \[2, 3\] does not fit the 8 output features"),
        ({"partition_type": "row", "shape": (-1, (1, 1))}, 8, "sizes sum to 2, but the weight has 3 input"),
        ({"partition_type": "row", "shape": (7, 3)}, 8, "does not fit the 8 output features"),
    ],
)
def test_shapes_that_the_weight_cannot_have(spec, out, problem):
    with pytest.raises(ValueError, match=problem):
        rows_of(spec, out, 2)


def test_thirds_are_not_q_k_and_v_of_grouped_heads():
    """The shape that a rule for Phi-3 often gives, which holds only if there are as many KV heads as query heads."""
    weight = Weight("layers.0.self_attn.qkv_proj.weight", (12, 3), "linear", attention=AttentionShape(4, 1, 2))
    with pytest.raises(ValueError, match=r"4, 4, 4 features .* are 8, 2, 2 .* declare shape \[\[8, 2, 2\], -1\]"):
        declared_cut(weight, LayerSpec(("x",), shape=(3, -1)))
    right = declared_cut(weight, LayerSpec(("x",), shape=((8, 2, 2), -1)))
    assert shard(torch.arange(12).unsqueeze(1), right, 1, 2)[:, 0].tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


def test_cuts_between_experts_are_refused():
    weight = Weight("mlp.experts.gate_up_proj", (2, 4, 3), "experts")
    with pytest.raises(ValueError, match="expert parallelism"):
        declared_cut(weight, LayerSpec(("x",), shape=(2, 4, -1), partition_dim=0))
    with pytest.raises(ValueError, match="holds 2 experts"):
        declared_cut(weight, LayerSpec(("x",), shape=(3, 4, -1), partition_dim=1))
