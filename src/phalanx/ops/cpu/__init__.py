"""Native CPU kernels behind the ops: compiled on first use with the system's C++ compiler, called through ctypes.

Importing this registers them; nothing is compiled before an op is selected for a CPU tensor. Where they cannot be
compiled, the plain PyTorch implementations stand in.
"""

from phalanx.ops.cpu import attention, linear, pointwise

__all__ = ["attention", "linear", "pointwise"]
