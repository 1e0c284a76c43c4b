"""The Triton attention against the reference in float64, on ragged batches with NaN wherever nobody may look."""

from __future__ import annotations

import pytest
import torch

from phalanx.ops.triton import attention as module
from phalanx.ops.triton.attention import attention
from tests.ops.triton.attention_case import check_written, exact, ragged, relative_error

# Rows of a tile that are not real divide 0 by 0 under the interpreter; they are not stored.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
WINDOWED = {"window": 9}
CAPPED = {"soft_cap": 2.0}
BIASED = {"biased": True}
DECODES = [(1, 90), (1, 0), (0, 7), (1, 300)]
MIXED = [(1, 600), (0, 3), (70, 0), (1, 5), (2, 40), (37, 30)]


@pytest.mark.parametrize(
    ("sizes", "heads", "kv_heads", "head_size", "dtype", "options"),
    [
        (DECODES, 4, 2, 16, torch.float32, {"padding": 3, "block_size": 32}),
        (DECODES, 4, 1, 24, torch.bfloat16, {"block_size": 5}),
        ([(1, 300), (0, 7)], 1, 1, 64, torch.float16, {"bound": 4000}),
        (DECODES, 8, 1, 80, torch.float32, WINDOWED),
        (DECODES, 2, 1, 16, torch.float32, CAPPED | BIASED),
        ([(1, 200)], 71, 1, 16, torch.bfloat16, {"block_size": 64}),
        ([(1, 900)], 2, 1, 256, torch.bfloat16, {"bound": 131072}),
        ([(1, 260)], 16, 1, 128, torch.bfloat16, {"cache_dtype": torch.float8_e4m3fn}),
        (MIXED, 4, 2, 16, torch.float32, {"padding": 3}),
        (MIXED, 3, 1, 24, torch.bfloat16, WINDOWED | {"block_size": 5}),
        (MIXED, 4, 2, 16, torch.float32, WINDOWED | CAPPED | BIASED | {"block_size": 1}),
        (MIXED, 2, 1, 16, torch.bfloat16, BIASED | {"cache_dtype": torch.float8_e4m3fn}),
        ([(150, 61)], 5, 1, 64, torch.bfloat16, {"window": 70, "bound": 9000}),
        ([(20, 3), (1, 9)], 1, 1, 112, torch.float16, CAPPED),
        ([(17, 3)], 2, 2, 256, torch.float32, {}),
    ],
)
def test_equals_the_reference(kernel_device, sizes, heads, kv_heads, head_size, dtype, options):
    case = ragged(sizes, heads, kv_heads, head_size, dtype=dtype, device=kernel_device, **options)
    found = check_written(attention, case)
    assert relative_error(found, exact(case)) < TOLERANCE[dtype]
    assert not found[int(case["cu_seqlens_q"][-1]) :].any()


def test_sizes_for_few_and_for_many_sequences(kernel_device):
    """A small batch, one that fills the device, and a large one: each table of sizes is taken for some."""
    case = ragged([(1, 3)] * 70, 8, 8, 16, device=kernel_device)
    del case["max_query_len"], case["max_seq_len"]
    taken = []
    for sequences in (8, 9, 64, 65):
        lengths = {"cu_seqlens_q": case["cu_seqlens_q"][: sequences + 1], "seq_lens": case["seq_lens"][:sequences]}
        call = module.Call(**case | lengths | {"key_bias": None})
        taken.append(module.decode_splits(call, 131072).tiles)
    few, usual, many = module.FEW_DECODE_TILES, module.DECODE_TILES, module.MANY_DECODE_TILES
    assert [few, usual, usual, many] == taken and usual != many != few


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "dtype", "options"),
    [
        (4, 1, 128, torch.bfloat16, {"padding": 2}),
        (2, 2, 80, torch.float16, WINDOWED | {"window": 150}),
        (2, 1, 128, torch.bfloat16, CAPPED | BIASED | {"cache_dtype": torch.float8_e4m3fn}),
    ],
)
@pytest.mark.parametrize("programs", [(0, 1), (0, 1 << 20), (1 << 20, 1 << 20)])
def test_all_sizes_equal_the_reference(
    kernel_device, monkeypatch, heads, kv_heads, head_size, dtype, options, programs
):
    monkeypatch.setattr(module, "FEW_PROGRAMS", programs[0])
    monkeypatch.setattr(module, "MANY_PROGRAMS", programs[1])
    sizes = [(1, 1300), (0, 3), (1, 127), (1, 0)]
    case = ragged(sizes, heads, kv_heads, head_size, dtype=dtype, device=kernel_device, **options)
    assert relative_error(check_written(attention, case), exact(case)) < TOLERANCE[dtype]


def test_splits_follow_shapes_not_contexts(kernel_device):
    """A graph captured for long contexts shares short ones out over as many programs."""
    case = ragged([(1, 1023)], 32, 8, 16, device=kernel_device)
    del case["max_query_len"], case["max_seq_len"]
    call = module.Call(**case | {"key_bias": None})
    splits = module.decode_splits(call, 131072)
    assert splits.most > 16 and 1024 // splits.min_keys == 16


def test_one_variant_whether_contexts_are_split_or_not(kernel_device, monkeypatch):
    """What a mixed batch of short contexts runs is what a decode of long ones has run when the engine started."""
    case = ragged([(1, 1023)] * 3, 32, 8, 16, dtype=torch.float16, device=kernel_device)
    del case["max_query_len"], case["max_seq_len"]
    call = module.Call(**case | {"key_bias": None})
    kinds, run = [], module.decode_kernel

    class Noted:
        def __getitem__(self, grid):
            def launch(*given, **options):
                tensors = [value for value in given if isinstance(value, torch.Tensor)]
                kinds.append(([(t.dtype, t.data_ptr() % 16) for t in tensors], options))
                run[grid](*given, **options)

            return launch

    monkeypatch.setattr(module, "decode_kernel", Noted())
    outs = []
    for most in (1, 4):
        module.decode(call, 3, 3, module.Splits(most, 128, 24))
        outs.append(call.out.clone())
    assert kinds[0] == kinds[1]
    torch.testing.assert_close(*outs, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("tokens", [0, 2])
def test_no_sequences(kernel_device, tokens):
    case = ragged([], 2, 1, 16, padding=tokens, device=kernel_device)
    assert torch.equal(attention(**case).cpu(), torch.zeros(tokens, 2, 16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": 0.0}, "positive scale"),
        ({"q": torch.zeros(1, 2, 32)}, r"\[blocks, block_size, kv_heads, 32\]"),
        ({"q": torch.zeros(1, 2, 16, dtype=torch.bfloat16)}, "float8_e4m3fn"),
        ({"seq_lens": torch.ones(1, dtype=torch.int64)}, "int32"),
        ({"q": torch.zeros(1, 3, 16)}, "do not divide"),
    ],
)
def test_what_is_not_taken_is_refused(changes, message):
    case = ragged([(1, 3)], 2, 2, 16)
    with pytest.raises(ValueError, match=message):
        attention(**case | changes)
