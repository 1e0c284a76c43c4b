"""Batch-invariant attention: right, and the same bits however a token comes to be computed."""

from __future__ import annotations

import pytest
import torch

from phalanx.ops.triton import attention_invariant as module
from phalanx.ops.triton.attention_invariant import count_pieces, invariant_attention, num_programs, walk_pieces
from tests.ops.triton.attention_case import check_written, exact, ragged, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SIZES = [(1, 520), (0, 3), (12, 250), (1, 5)]
CASES = [
    (torch.bfloat16, {}),
    (torch.float32, {"window": 300}),
    (torch.bfloat16, {"soft_cap": 2.0, "biased": True}),
]


@pytest.mark.parametrize(("dtype", "options"), CASES)
def test_equals_the_reference(kernel_device, dtype, options):
    case = ragged(SIZES, 4, 1, 16, dtype=dtype, padding=2, device=kernel_device, **options)
    found = check_written(invariant_attention, case)
    assert relative_error(found, exact(case)) < (1e-5 if dtype == torch.float32 else 1e-2)
    assert not found[-2:].any()


def test_cuts_lie_at_fixed_positions():
    assert [count_pieces(n) for n in (0, 1, 256, 257, 2048, 2049, 2561, 131072)] == [1, 1, 1, 2, 8, 9, 10, 49]


@pytest.mark.parametrize(("dtype", "options"), CASES)
def test_bits_do_not_depend_on_the_batch(kernel_device, dtype, options):
    case = ragged(SIZES, 4, 1, 16, dtype=dtype, device=kernel_device, **options)
    rows = module.Call(
        **{k: v for k, v in case.items() if not k.startswith("max_")} | {"key_bias": case.get("key_bias")}
    )
    alone, whole = 1, count_pieces(case["max_seq_len"])
    assert num_programs(rows, whole) > 1
    walk_pieces(rows, whole, alone)
    together = rows.out.clone()
    # The pieces joined by the merge, shared out over another number of programs.
    assert torch.equal(invariant_attention(**case | {"max_seq_len": 800}), together)
    # Each of some rows as a decode, and as the end of a chunk, without its batch mates.
    for sequence, length, last in [(0, 1, 520), (2, 1, 255), (2, 5, 258)]:
        first = int(case["cu_seqlens_q"][sequence]) + last - length + 1 - SIZES[sequence][1]
        part = slice(first, first + length)
        found = invariant_attention(
            **case
            | {
                "q": case["q"][part],
                "block_table": case["block_table"][sequence : sequence + 1],
                "cu_seqlens_q": torch.tensor([0, length], dtype=torch.int32, device=kernel_device),
                "seq_lens": torch.tensor([last + 1], dtype=torch.int32, device=kernel_device),
                "max_query_len": length,
            }
        )
        assert torch.equal(found, together[part])
