"""The native CPU kernels as ctypes functions, and whether they can serve a device and dtype.

ctypes releases the interpreter lock during a call. Tensors are passed as addresses: the callers check shapes and
strides, and hold the tensors while a call runs.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import torch

from phalanx.ops.cpu.compiler import CompileError, compiled_library

log = logging.getLogger("phalanx")

_pointer, _long, _int, _double = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_double
_struct = ctypes.c_char_p

# The arguments of the C++ functions, in their order.
SIGNATURES: dict[str, list[Any]] = {
    "phalanx_linear": [_pointer, *[_long] * 4, *[_pointer] * 3, *[_int] * 4],
    "phalanx_pack": [_pointer, *[_long] * 3, _pointer, _long, _int],
    "phalanx_attention": [_struct, *[_pointer] * 7, *[_int] * 2],
    "phalanx_rope_write_kv": [_struct, *[_pointer] * 9, _int],
    "phalanx_rms_norm": [_pointer, *[_long] * 3, *[_pointer] * 2, _double, *[_long] * 2, *[_pointer] * 2, *[_int] * 3],
    "phalanx_activate": [_pointer, *[_long] * 3, _int, *[_double] * 2, _pointer, *[_int] * 2],
}


class Library:
    """The loaded kernels. `amx` says whether the tile unit may be used.

    Args:
        path: the compiled library.
    """

    def __init__(self, path: Path) -> None:
        handle = ctypes.CDLL(str(path))
        for name, arguments in SIGNATURES.items():
            function = getattr(handle, name)
            function.argtypes, function.restype = arguments, None
        self.linear = handle.phalanx_linear
        self.pack = handle.phalanx_pack
        self.attention = handle.phalanx_attention
        self.rope_write_kv = handle.phalanx_rope_write_kv
        self.rms_norm = handle.phalanx_rms_norm
        self.activate = handle.phalanx_activate
        self.amx = bool(handle.phalanx_request_amx())


@functools.cache
def library() -> Library | None:
    """The kernels, compiled if need be; None, after one message that says why, where they cannot be had."""
    try:
        return Library(compiled_library())
    except (CompileError, OSError, AttributeError) as error:
        log.warning("the native CPU kernels are not available, plain PyTorch stands in (slower): %s", error)
        return None


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels can run tensors of this dtype on this device."""
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and library() is not None


def kernels() -> Library:
    """The kernels, where `supports` has said yes."""
    loaded = library()
    if loaded is None:
        raise RuntimeError("the native CPU kernels are not available here; ask supports() before using them")
    return loaded
