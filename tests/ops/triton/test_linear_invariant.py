"""Products that depend neither on the rows beside a row nor on the number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.ops.linear import PreparedWeight, prepare_linear, reader_of
from phalanx.ops.triton import invariant
from phalanx.ops.triton.invariant import InvariantLinear, partial, product, tree_sum
from tests.ops.triton import attention_case  # noqa: F401  (completes the interpreter)


@pytest.fixture(autouse=True)
def small_tiles(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel_device.type == "cpu":
        for name in ("BLOCK_M", "BLOCK_N"):
            monkeypatch.setattr(invariant, name, 16)


def drawn(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(device)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("rows", "out_features", "in_features"), [(1, 20, 256), (19, 33, 72), (3, 16, 37)])
def test_products(
    dtype: torch.dtype, bound: float, rows: int, out_features: int, in_features: int, kernel_device: torch.device
) -> None:
    x = drawn(rows, in_features + 8, dtype=dtype, device=kernel_device)[:, :in_features]
    weight, bias = (
        drawn(*s, dtype=dtype, device=kernel_device) for s in ((out_features, in_features), (out_features,))
    )
    prepared = InvariantLinear().prepare(weight)
    found = InvariantLinear().apply(x, prepared, bias)
    wanted = x.double() @ weight.double().T + bias.double()
    assert found.dtype == dtype
    assert float((found.double() - wanted).norm() / wanted.norm()) < bound


def test_a_row_is_bit_equal_whatever_stands_beside_it(kernel_device: torch.device) -> None:
    x, weight = (drawn(*shape, dtype=torch.float32, device=kernel_device) for shape in ((21, 64), (24, 64)))
    prepared = InvariantLinear().prepare(weight)
    together = InvariantLinear().apply(x, prepared, None)
    for row in range(0, 21, 5):
        assert torch.equal(InvariantLinear().apply(x[row : row + 1], prepared, None)[0], together[row])


def test_leaves_are_added_up_as_a_tree(kernel_device: torch.device) -> None:
    x, weight = (drawn(*shape, dtype=torch.float32, device=kernel_device) for shape in ((3, 128), (16, 128)))
    leaves = [product(x[:, s : s + 16], weight[:, s : s + 16], None, 1, torch.float32) for s in range(0, 128, 16)]
    assert torch.equal(product(x, weight, None, 8, torch.float32), tree_sum(torch.stack(leaves)))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_that_share_k_add_up_to_the_same(ranks: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    x, weight = (drawn(*shape, dtype=dtype, device=kernel_device) for shape in ((5, 192), (17, 192)))
    share = 192 // ranks
    parts = []
    for rank in range(ranks):
        part = slice(rank * share, (rank + 1) * share)
        held = PreparedWeight(weight[:, part].contiguous(), "plain", 17, share, dtype)
        parts.append(partial(x[:, part], held, ranks))
    assert parts[0].dtype == torch.float32
    whole = InvariantLinear().apply(x, InvariantLinear().prepare(weight), None)
    assert torch.equal(tree_sum(torch.stack(parts)).to(dtype), whole) or dtype == torch.bfloat16
    if dtype == torch.bfloat16:
        # The interpreter cuts off where torch rounds.
        torch.testing.assert_close(tree_sum(torch.stack(parts)).to(dtype), whole, rtol=1e-2, atol=1e-2)


def test_refusals(kernel_device: torch.device) -> None:
    held = PreparedWeight(torch.zeros(4, 9, device=kernel_device), "plain", 4, 9, torch.float32)
    x = torch.zeros(1, 9, device=kernel_device)
    with pytest.raises(ValueError, match="1, 2, 4 or 8 ranks; given 3"):
        partial(x, held, 3)
    with pytest.raises(ValueError, match="inputs that 8 divides; this weight has 9 on a rank"):
        partial(x, held, 4)
    with pytest.raises(ValueError, match=r"takes \[\.\.\., 9\] of torch.float32; x is \(1, 8\)"):
        InvariantLinear().apply(x[:, :8], held, None)


def test_it_is_taken_by_name_only() -> None:
    cuda = torch.device("cuda")
    assert not isinstance(reader_of("plain", cuda, torch.bfloat16), InvariantLinear)
    assert isinstance(reader_of("plain", cuda, torch.bfloat16, "invariant"), InvariantLinear)
    assert prepare_linear(torch.zeros(2, 2)).reader is None
