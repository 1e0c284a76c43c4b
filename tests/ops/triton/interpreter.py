"""What Triton's interpreter lacks, put in once."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def complete() -> None:
    """Lets interpreted loops run to bounds that were loaded (numpy 2.4 no longer makes an int of an array of one), and
    makes `tl.dot` take bfloat16, which the interpreter holds as its bits.
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

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)
