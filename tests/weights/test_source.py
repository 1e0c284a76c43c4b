import pytest
import torch

from phalanx.layout import Partition, shard
from phalanx.weights import TensorInfo, WeightError, WeightSource


class Counting(WeightSource):
    """A user's own source: the three methods are enough."""

    def __init__(self):
        self.reads = []

    def names(self):
        return ["w"]

    def info(self, name):
        return TensorInfo((4, 2), torch.float32)

    def read(self, name, index=None):
        self.reads.append(index)
        whole = torch.arange(8.0).reshape(4, 2)
        return whole if index is None else whole[index]


def test_a_tensor_of_a_source_is_read_when_it_is_sliced():
    source = Counting()
    lazy = source.tensor("w")
    assert (lazy.name, lazy.shape, lazy.dtype, lazy.ndim) == ("w", (4, 2), torch.float32, 2)
    assert source.reads == [] and source.verify() == []
    assert lazy[1:2].tolist() == [[2.0, 3.0]]
    assert lazy[:, 1:].tolist() == [[1.0], [3.0], [5.0], [7.0]]
    assert lazy.load().shape == (4, 2)
    assert "SourceTensor('w', (4, 2)" in repr(lazy)


def test_a_source_is_sharded_without_reading_the_rest():
    source = Counting()
    assert shard(source.tensor("w"), Partition.column(), 1, 2).tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert source.reads == [(slice(2, 4), slice(0, 2))]


@pytest.mark.parametrize("index", [0, (0, slice(None)), slice(0, 4, 2), (slice(None),) * 3])
def test_only_ranges_slice_a_lazy_tensor(index):
    with pytest.raises(TypeError, match=r"w of shape \(4, 2\) is sliced by ranges"):
        Counting().tensor("w")[index]


def test_the_error_lists_all_problems():
    error = WeightError("first", "second")
    assert error.problems == ["first", "second"] and str(error) == "first\nsecond"


def test_torch_takes_a_lazy_tensor_for_the_tensor_that_it_is():
    lazy, ones = Counting().tensor("w"), torch.ones(4, 2)
    assert torch.cat((lazy, lazy)).shape == (8, 2)
    assert torch.equal(lazy + ones, lazy.load() + 1) and torch.equal(torch.mul(lazy, other=2), 2 * lazy.load())
    assert torch.equal(lazy.t(), lazy.load().t()) and lazy.reshape(2, 4).shape == (2, 4) and not lazy.is_cuda
    with pytest.raises(AttributeError, match="a SourceTensor has no attribute 'no_such'"):
        _ = lazy.no_such
