"""What Triton's interpreter lacks, put in once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TORCH = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}


def complete() -> None:
    """Lets interpreted loops run to bounds that were loaded (numpy 2.4 no longer makes an int of an array of one), and
    makes `tl.dot` take bfloat16, which the interpreter holds as its bits. And what a GPU does: numbers are rounded to
    shorter ones, not cut off, NaN stays NaN in e4m3, of a number and NaN the larger and the smaller one are the number,
    and a row of a product has the same bits whatever stands beside it (numpy's sums depend on shapes and the processor,
    which does not show once sums of float64 are rounded).
    """
    if hasattr(interpreter, "completed"):
        return
    interpreter.completed = True
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def multiplied(self: Any, a: Any, b: Any, total: Any, *rest: Any) -> Any:
        a, b = widened(a), widened(b)
        if not np.issubdtype(total.data.dtype, np.floating):
            return dot(self, a, b, total, *rest)
        wide = interpreter.TensorHandle(total.data.astype(np.float64), tl.float64)
        return interpreter.TensorHandle(dot(self, a, b, wide, *rest).data.astype(total.data.dtype), total.dtype.scalar)

    convert, builder = interpreter._convert_float, interpreter.InterpreterBuilder

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source not in TORCH or target not in TORCH:
            return convert(values, source, target, rounding)
        wide = torch.from_numpy(np.array(values)).view(TORCH[source]).float()
        wide = wide.clamp(-448, 448) if target == tl.float8e4nv else wide
        return wide.to(TORCH[target]).view(torch.uint8).numpy()

    interpreter._convert_float = converted
    interpreter._patch_lang_tensor = patched
    builder.create_dot = multiplied
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
