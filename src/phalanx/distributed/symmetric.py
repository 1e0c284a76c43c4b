"""All-reduce between the GPUs of one machine, by kernels that write to the other GPUs' memory.

Every rank sends its tensor to the others, waits for theirs, and adds up all of them in fp32 and in the order of the
ranks, so that all get the same bits. One launch, no host: it can be captured in a graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from phalanx.distributed.group import Group, GroupError
from phalanx.distributed.shared_memory import share
from phalanx.distributed.symmetric_kernels import all_reduce_kernel, all_reduce_words_kernel

# Programs of a launch: few enough that all of them run at the same time.
_PROGRAMS = 128
# Bytes of a program's place, so the most that a program adds up at a time.
_PLACE_BYTES = 1 << 16
_MAX_ELEMENTS = 1 << 14
_PLACES = 3
_SIGNAL_BYTES = _PLACES * _PROGRAMS * 4
_MAX_WORDS = 1 << 12
_WORD_PLACE_BYTES = 8 * _MAX_WORDS
# A wait looks about this often in a second.
_LOOKS_PER_SECOND = 1_500_000


def memory_bytes(ranks: int) -> int:
    """What each of so many ranks shares."""
    return _first_word_byte(ranks) + 2 * ranks * _PROGRAMS * _WORD_PLACE_BYTES


def _first_word_byte(ranks: int) -> int:
    """Behind signals and places, where those of words sent with their call's number are."""
    return _SIGNAL_BYTES + _PLACES * ranks * _PROGRAMS * _PLACE_BYTES


class SymmetricMemory:
    """All-reduce over memory that the GPUs of one machine share.

    All ranks make it at the same time, and call the same methods in the same order on one stream at a time. It takes 64
    MiB of each of 2 GPUs, 256 MiB of each of 8, beside what PyTorch counts and until the process ends.

    Args:
        group: its ranks, 2 to 8, one process each, with its tensors on this rank's GPU.
        device: this rank's GPU. All processes see the same GPUs.
        max_bytes: the largest tensor that ``fits``; beyond, NCCL is faster. By default 2 MiB; of 2 ranks, which send no
            more this way than by a ring, 1 GiB.
        words_bytes: up to this size, tensors of 16-bit numbers are sent with a mark at each word, which takes the
            fewest steps; beyond, twice the bytes cost more.
        patience: about how many seconds a kernel waits for the other ranks before it gives up.

    Raises:
        ValueError: the number of ranks, or ``max_bytes``.
        GroupError: the memory cannot be shared, on any of the ranks; all of them raise.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        *,
        max_bytes: int | None = None,
        words_bytes: int = 256 << 10,
        patience: float = 10.0,
    ) -> None:
        if not 2 <= group.size <= 8:
            raise ValueError(f"memory is shared by 2 to 8 ranks, the group has {group.size}")
        if max_bytes is None:
            max_bytes = 1 << 30 if group.size == 2 else 2 << 20
        if max_bytes < 1:
            raise ValueError(f"max_bytes is at least 1, given {max_bytes}")
        self.rank, self.size, self.max_bytes, self.words_bytes = group.rank, group.size, max_bytes, words_bytes
        self._patience = max(1, min(int(patience * _LOOKS_PER_SECOND), 2**31 - 1))
        # Of each program, for the one kernel and for the other; ahead of both, whether a wait was given up.
        self._state = torch.zeros(1 + 2 * _PROGRAMS, 8, dtype=torch.int32, device=device)
        # Since Hopper a kernel can start before the one ahead of it has ended.
        early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        self._launched: dict[str, bool] = {"PDL": True, "launch_pdl": True} if early else {"PDL": False}
        self._memories = torch.tensor(share(group, device, memory_bytes(group.size)), dtype=torch.int64, device=device)

    def fits(self, t: Tensor) -> bool:
        """Whether ``all_reduce`` takes the tensor; depends on shape, strides and dtype only."""
        return t.dtype in _DTYPES and t.is_contiguous() and 0 < t.nbytes <= self.max_bytes

    def fits_norm(self, x: Tensor) -> bool:
        """Whether ``all_reduce_add_rms_norm`` takes x."""
        return self.fits(x) and x.dim() == 2 and _padded(x.shape[1]) <= _MAX_ELEMENTS

    def all_reduce(self, t: Tensor) -> Tensor:
        """The sum of every rank's tensor, added up in fp32, in t's dtype; t stays.

        Raises:
            ValueError: it does not fit.
        """
        if not self.fits(t):
            raise ValueError(f"all_reduce: {_described(t)} does not fit: see SymmetricMemory.fits")
        count = t.numel()
        block = 2048
        while block * _PROGRAMS < count and block < _MAX_ELEMENTS:
            block *= 2
        out = torch.empty_like(t)
        self._launch(-(-count // block), t, t, t, out, out, count, block, 0.0, 1, block, False)
        return out

    def all_reduce_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``new`` = the sum of every rank's x, rounded to x's dtype, + residual, rounded; (its RMSNorm, new).

        Args:
            x: [rows, N], this rank's.
            residual: [rows, N] of x's dtype, contiguous, the same on all ranks.
            weight: [N], contiguous, of any floating dtype.

        Raises:
            ValueError: x does not fit, or the others do not go with it.
        """
        if not self.fits_norm(x):
            raise ValueError(f"all_reduce_add_rms_norm: {_described(x)} does not fit: see SymmetricMemory.fits_norm")
        if residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous():
            raise ValueError(f"expected a residual like x, {_described(x)}, contiguous; given {_described(residual)}")
        rows, width = x.shape
        if weight.shape != (width,) or not weight.is_contiguous():
            raise ValueError(f"expected a contiguous weight [{width}], given {_described(weight)}")
        normed, new = torch.empty_like(x), torch.empty_like(x)
        each = min(_rows_each(rows), _MAX_ELEMENTS // _padded(width))
        programs = -(-rows // each)
        self._launch(programs, x, residual, weight, normed, new, x.numel(), width, eps, each, _padded(width), True)
        return normed, new

    @property
    def fault_flag(self) -> Tensor:
        """int32 [1] on the GPU: not 0 once a kernel has given up waiting."""
        return self._state[0, :1]

    def check(self) -> None:
        """Waits for the GPU. Raises GroupError if a kernel has given up waiting: results since then are wrong."""
        if int(self._state[0, 0]):
            raise GroupError(f"rank {self.rank}: an all-reduce over shared memory waited in vain for another rank")

    def _launch(
        self, blocks: int, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, size: int,
        row: int, eps: float, rows: int, block: int, norm: bool,
    ) -> None:  # fmt: skip
        programs = min(blocks, _PROGRAMS)
        tensors = (x, residual, weight, out, total)
        options: dict[str, Any] = {"RANKS": self.size, "PADDED_RANKS": triton.next_power_of_2(self.size)}
        options |= {"ROWS": rows, "NORM": norm, "PROGRAMS": _PROGRAMS}
        options |= {"num_warps": max(1, min(16, rows * block // 256)), **self._launched}
        if (
            x.nbytes <= self.words_bytes
            and blocks <= _PROGRAMS
            and rows == 1
            and block <= 2 * _MAX_WORDS
            and _in_words(x, size, row)
            and _in_words(residual, size, row)
        ):
            all_reduce_words_kernel[(programs,)](
                *tensors, self._memories, self._state, size, row, self.rank, self._patience, eps,
                WORDS=block // 2, FIRST_BYTE=_first_word_byte(self.size), PLACE_BYTES=_WORD_PLACE_BYTES, **options,
            )  # fmt: skip
            return
        all_reduce_kernel[(programs,)](
            *tensors, self._memories, self._state, size, row, -(-blocks // programs), self.rank, self._patience, eps,
            BLOCK=block, PLACES=_PLACES, PLACE_BYTES=_PLACE_BYTES,
            **options,
        )  # fmt: skip


def _in_words(t: Tensor, size: int, row: int) -> bool:
    """Whether rows of t are whole words of 32 bits with two numbers; on all ranks or on none."""
    return t.element_size() == 2 and size % 2 == 0 and row % 2 == 0 and t.storage_offset() % 2 == 0


def _rows_each(rows: int) -> int:
    """Rows of a program, so that there are programs enough."""
    return int(triton.next_power_of_2(-(-rows // _PROGRAMS)))


def _padded(width: int) -> int:
    return max(256, int(triton.next_power_of_2(width)))


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _described(t: Tensor) -> str:
    return f"{t.dtype} {tuple(t.shape)} with strides {t.stride()}"
