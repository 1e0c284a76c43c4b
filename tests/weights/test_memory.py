import pytest
import torch
from torch import nn

from phalanx.weights import MemorySource, WeightError, open_source


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("scratch", torch.ones(1), persistent=False)


def test_a_module_gives_tied_parameters_under_each_name():
    module = Tied()
    source = open_source(module)
    assert sorted(source.names()) == ["embed.weight", "head.weight", "scale"]
    read = source.read("head.weight")
    assert torch.equal(read, module.embed.weight) and not read.requires_grad
    assert torch.equal(source.tensor("embed.weight")[1:3], module.embed.weight[1:3])
    assert source.verify() == []


def test_mappings_and_pairs(tmp_path):
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(1)}
    for source in (open_source(tensors), open_source(iter(tensors.items())), open_source(list(tensors.items()))):
        assert source.names() == ["a", "b"] and source.info("a") == ((2, 3), torch.float32)
        assert torch.equal(source.read("a"), tensors["a"])


def test_lazy_tensors_may_be_passed_on():
    inner = MemorySource({"a": torch.arange(4)})
    outer = open_source({"b": inner.tensor("a")})
    assert outer.verify() == []
    assert outer.read("b").tolist() == [0, 1, 2, 3] and outer.tensor("b")[1:2].tolist() == [1]


def test_problems_are_named():
    with pytest.raises(WeightError, match="give 'a' twice"):
        open_source([("a", torch.ones(1)), ("a", torch.ones(1))])
    assert open_source({"n": 3, "m": torch.empty(2, device="meta")}).verify() == [
        "n is a int, not a tensor",
        "m has no values, it is on the meta device: load the weights first",
    ]
    with pytest.raises(WeightError, match="the nearest names are weight"):
        open_source({"weight": torch.ones(1)}).info("weigth")
