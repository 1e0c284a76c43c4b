"""The kernels of matrix products compile for a Hopper GPU, in the sizes that the rules choose for real models."""

from __future__ import annotations

import pytest

from tests.ops.triton.ahead_of_time import run_uninterpreted

PROGRAM = """
from phalanx.ops.triton import fp8_kernels, fp8_linear, grouped, grouped_kernels, invariant, linear, linear_kernels
from phalanx.ops.triton import activation_kernels, norm, quantized_kernels, quantized_linear
from tests.ops.triton.ahead_of_time import compile_for_hopper

done = set()
def compiled(kernel, types, warps, stages, **constants):
    key = (kernel, str(types), warps, stages, str(constants))
    if key in done:
        return
    done.add(key)
    types = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    used = compile_for_hopper(kernel, types, constants, warps, stages, ("m", "slots", "tiles"))
    print(kernel.fn.__name__, warps, stages, constants, used)
    if used.shared > 232448 or used.spilled > 64:
        raise SystemExit("more shared memory than a program can have, or registers spilled")

def of(dtype, *names, **others):
    return {name: "*" + dtype for name in names} | {name: "*" + other for name, other in others.items()}

bf16 = of("bf16", "x", "w", "bias", "y")
of_bytes = [
    of(dtype, "x", "bias", "y", "out", w=number, scale="fp32")
    for dtype in ("bf16", "fp16") for number in ("i8", "fp8e4nv")
]
fp8 = of("fp8e4nv", "x", "w", x_scale="fp32", scale="fp32", bias="bf16", y="bf16")
SHAPES = [(6144, 4096), (28672, 4096), (4096, 14336), (1024, 2048)]
for n, k in SHAPES:
    common = dict(BIASED=False, PDL=True)
    for rows in (1, 8, 32, 64):
        if rows == 1:
            tile = linear.tile_for(k)
            constants = common | dict(EVEN_K=True, BLOCK_N=tile.columns, BLOCK_K=tile.inner)
            constants |= dict(SCALED=False, STEPS=tile.steps)
            kernel = linear_kernels.one_row_kernel
            for gate in ("none", "silu"):
                types = bf16 | of("fp32", "scale")
                compiled(kernel, types, tile.warps, 3, GATE=gate, **constants)
            for types in of_bytes:
                compiled(kernel, types, tile.warps, 3, GATE="none", **constants | dict(SCALED=True))
            tile = fp8_linear.row_tile(k)
            constants = common | dict(EVEN_K=True, BLOCK_N=tile.columns, BLOCK_K=tile.inner)
            constants |= dict(STEPS=tile.steps, ONCE=k <= 8 * tile.inner, PREFETCH=tile.prefetch)
            for gate in ("none", "silu"):
                types = fp8 | of("fp32", "maxima")
                compiled(fp8_kernels.fp8_row_kernel, types, tile.warps, 3, GATE=gate, **constants)
        else:
            tile = fp8_linear.rows_tile(rows, n, k, 132)
            constants = common | dict(EVEN_K=True, BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.inner)
            constants |= dict(SWAPPED=tile.swapped, PREFETCH=tile.prefetch, STEP=128, SCALED=True)
            for gate in ("none", "silu"):
                types, gated = fp8 | of("fp32", "maxima"), dict(GATE=gate, MAXIMA=gate != "none")
                compiled(linear_kernels.few_rows_kernel, types, 4, tile.stages, **gated, **constants)
            tile = linear.rows_tile(rows, n, k, 132)
            for gate in ("none", "silu") if tile else ():
                constants = common | dict(EVEN_K=True, BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.inner)
                constants |= dict(SWAPPED=tile.swapped, PREFETCH=tile.prefetch, STEP=64)
                constants |= dict(SCALED=False, GATE=gate, MAXIMA=False)
                types = bf16 | of("fp32", "x_scale", "scale", "maxima")
                compiled(linear_kernels.few_rows_kernel, types, 4, tile.stages, **constants)
        tile = quantized_linear.tile_for(rows, n, k, 132)
        constants = common | dict(BLOCK_M=max(16, rows), BLOCK_N=tile.columns, PREFETCH=tile.prefetch)
        kernel = quantized_kernels.byte_rows_kernel
        even = dict(EVEN_K=True, BLOCK_K=tile.inner)
        for types in of_bytes:
            compiled(kernel, types, tile.warps, tile.stages, **even, **constants)
        int4 = bf16 | of("bf16", "scale", "offset", w="u8")
        few = dict(warps=4, stages=5) if rows <= 16 else dict(warps=8, stages=4)
        constants["BLOCK_M"] = min(32, constants["BLOCK_M"])
        compiled(quantized_kernels.int4_rows_kernel, int4, few["warps"], few["stages"], GROUP=128, **constants)
quantized = of("bf16", "x", numbers="fp8e4nv", scales="fp32")
for block, once in ((4096, True), (16384, True), (16384, False)):
    compiled(fp8_kernels.quantize_rows_kernel, quantized, 16, 3, BLOCK=block, ONCE=once, PDL=True)
of_rows = of("bf16", "x", "residual", "weight", "bias", "out", "total", numbers="fp8e4nv", scales="fp32")
flags = dict(ADD=True, CENTRE=False, WEIGHT=True, BIAS=False, FP8=True, PDL=True)
compiled(norm._norm_kernel, of_rows | {"eps": "fp32"}, 8, 3, WIDTH=4096, PADDED=4096, ROWS=1, **flags)
compiled(fp8_kernels.gated_fp8_kernel, of_rows, 16, 3, KIND="silu", BLOCK=16384, PDL=True)
flags = dict(GATED=True, MAXIMA=True, BLOCK=1024, PDL=True)
compiled(activation_kernels.activation_kernel, of_rows | of("fp32", "maxima"), 4, 3, KIND="silu", **flags)
for count in (16, 8192):
    with_maxima = quantized | of("fp32", "maxima")
    compiled(fp8_kernels.quantize_part_kernel, with_maxima, 8, 3, BLOCK=2048, COUNT=count, PDL=True)
for types in of_bytes:
    compiled(quantized_kernels.restore_byte_kernel, types, 4, 3, BLOCK_N=4, BLOCK_K=1024)
compiled(quantized_kernels.restore_int4_kernel, of("bf16", "scale", "offset", "out", w="u8"), 4, 3,
         GROUP=128, BLOCK_N=32, NATIVE=True)

places = of("i32", "order", "tile_expert", "tile_first", "tile_end")
compiled(grouped_kernels.place_kernel, places | of("i64", "ids"), 4, 3, EXPERTS=128, BINS=128, BLOCK_M=16, CHUNK=1024)
for slots in (8, 512, 8192, 65536):
    tile = grouped.tile_for(slots, 128, 2)
    compiled(grouped_kernels.grouped_kernel, bf16 | places, tile.warps, tile.stages, PER_ROW=8, EVEN_K=True,
             BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.inner)
compiled(grouped_kernels.combine_kernel, of("bf16", "found", "out", weights="fp32"), 4, 3, PER_TOKEN=8, BLOCK=1024)
for dtype, size, stages in (("bf16", 2, 4), ("fp32", 4, 2)):
    compiled(invariant.invariant_kernel, of(dtype, "x", "w", "bias", "y"), 4, stages, LEAVES=8, BIASED=True,
             BLOCK_M=invariant.BLOCK_M, BLOCK_N=invariant.BLOCK_N, BLOCK_K=invariant.BLOCK_K[size])
"""


@pytest.mark.slow
def test_main_variants_compile() -> None:
    run_uninterpreted(PROGRAM)
