"""The attention kernels compile for a Hopper GPU, in a process of its own that does not interpret them."""

from __future__ import annotations

import pytest

from tests.ops.triton.ahead_of_time import run_uninterpreted

PROGRAM = """
from phalanx.ops.triton import attention, attention_invariant, attention_kernels as kernels
from phalanx.ops.triton import attention_prefill_kernel as prefill
from tests.ops.triton.ahead_of_time import compile_for_hopper

LOOSE = (*kernels.VARYING, *kernels.UNALIGNED, "window")
TENSORS = {"block_table": "*i32", "cu_seqlens": "*i32", "seq_lens": "*i32"}
TENSORS |= {"key_bias": "*fp32", "parts": "*fp32", "stats": "*fp32"}
FACTORS = {"unit": "fp32", "cap_in": "fp32", "cap_out": "fp32"}

def compiled(kernel, table, dtype, cache, size, **features):
    tile = next(t for limit, t in table[4 if dtype == "fp32" else 2].items() if limit >= size)
    constants = dict(KV_HEADS=8, GROUP=4, HEADS=32, BLOCK_SIZE=16, HEAD_SIZE=size, BLOCK_D=size)
    constants |= dict(BLOCK_M=tile.rows or 16, BLOCK_N=tile.keys, PDL=True)
    constants |= dict(WINDOW=False, CAPPED=False, BIASED=False) | features
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    types = TENSORS | FACTORS | {name: "*" + dtype for name in ("q", "out")}
    types |= {name: "*" + cache for name in ("k_cache", "v_cache")}
    types = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    used = compile_for_hopper(kernel, types, constants, tile.warps, tile.stages, LOOSE)
    print(kernel.fn.__name__, dtype, cache, size, features, used)
    if used.shared > 232448:
        raise SystemExit("more shared memory than a program can have")

compiled(kernels.decode_kernel, attention.DECODE_TILES, "bf16", "bf16", 128)
compiled(kernels.decode_kernel, attention.DECODE_TILES, "bf16", "fp8e4nv", 128)
compiled(kernels.decode_kernel, attention.FEW_DECODE_TILES, "bf16", "bf16", 128)
compiled(kernels.decode_kernel, attention.MANY_DECODE_TILES, "bf16", "bf16", 128)
compiled(kernels.decode_kernel, attention.MANY_DECODE_TILES, "bf16", "fp8e4nv", 128)
for few, merge in ((False, attention.MERGES), (True, attention.FEW_MERGES)):
    tables = {2: {128: attention.Tile(0, 64, merge.warps, 3)}}
    features = dict(BLOCK_H=merge.heads, AT_ONCE=merge.splits, EAGER=few)
    compiled(kernels.merge_kernel, tables, "bf16", "bf16", 128, **features)
compiled(prefill.prefill_kernel, attention.PREFILL_TILES, "bf16", "bf16", 128)
compiled(prefill.prefill_kernel, attention.PREFILL_TILES, "bf16", "fp8e4nv", 64, WINDOW=True)
compiled(prefill.prefill_kernel, attention.PREFILL_TILES, "fp16", "fp16", 256, CAPPED=True, BIASED=True)
compiled(prefill.prefill_kernel, attention.PREFILL_TILES, "fp32", "fp32", 64)
compiled(attention_invariant.invariant_kernel, attention_invariant.INVARIANT_TILES, "bf16", "bf16", 128)
compiled(attention_invariant.invariant_kernel, attention_invariant.INVARIANT_TILES, "bf16", "bf16", 256)
compiled(attention_invariant.join_kernel, attention_invariant.INVARIANT_TILES, "bf16", "bf16", 128)
"""


@pytest.mark.slow
def test_main_variants_compile():
    run_uninterpreted(PROGRAM)
