"""The kernels that add up over ranks compile for a Hopper GPU, in a process of its own that does not interpret them."""

from __future__ import annotations

import pytest

from tests.ops.triton.ahead_of_time import run_uninterpreted

PROGRAM = """
from phalanx.distributed import symmetric, symmetric_kernels as kernels
from tests.ops.triton.ahead_of_time import compile_for_hopper

TYPES = {name: "*bf16" for name in ("x", "residual", "weight", "out", "total")}
TYPES |= {"memories": "*i64", "state": "*i32", "eps": "fp32"}

def compiled(kernel, ranks, rows, block, warps, norm):
    constants = dict(RANKS=ranks, PADDED_RANKS=ranks, ROWS=rows, BLOCK=block, WORDS=block // 2, NORM=norm, PDL=True)
    constants |= dict(PROGRAMS=symmetric._PROGRAMS, PLACES=symmetric._PLACES, PLACE_BYTES=symmetric._PLACE_BYTES)
    constants["FIRST_BYTE"] = symmetric._first_word_byte(ranks)
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    types = {name: TYPES.get(name, "i32") for name in kernel.arg_names if name not in constants}
    print(kernel.fn.__name__, ranks, rows, block, norm,
          compile_for_hopper(kernel, types, constants, warps, 3, ("rank", "patience", "steps")))

for ranks in (2, 8):
    for rows, block, norm in ((1, 4096, True), (2, 4096, True), (4, 4096, True), (1, 16384, False)):
        compiled(kernels.all_reduce_kernel, ranks, rows, block, 16, norm)
    for block, norm in ((4096, True), (2048, False)):
        compiled(kernels.all_reduce_words_kernel, ranks, 1, block, block // 256, norm)
"""


@pytest.mark.slow
def test_main_variants_compile() -> None:
    run_uninterpreted(PROGRAM)
