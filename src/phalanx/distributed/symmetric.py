"""All-reduce of small tensors between the GPUs of one machine, by a kernel that reads the other GPUs' memory.

Every rank puts its tensor into memory that all see, tells the others, waits for them, and adds up all ranks' tensors in
fp32 and in the order of the ranks, so that all get the same bits. One launch, no host: it can be captured in a graph.

Each program has a place of its own in every rank's memory and talks to the same program of the other ranks only. It has
two places, used in turn: when one is written again, the others have read it, since they have sent the signal that the
call between waited for. Therefore one exchange of signals a call is enough.
"""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.distributed.group import Group, GroupError

# Programs of a launch: few enough that all of them run at the same time.
_PROGRAMS = 128
# Bytes of a program's place, so the most that a program adds up.
_PLACE_BYTES = 1 << 16
_MAX_ELEMENTS = 1 << 14
_SIGNAL_BYTES = 2 * _PROGRAMS * 4
_MEMORY_BYTES = _SIGNAL_BYTES + 2 * _PROGRAMS * _PLACE_BYTES
# A wait looks about this often in a second.
_LOOKS_PER_SECOND = 1_500_000


@triton.jit(do_not_specialize=["rank", "patience"])
def all_reduce_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, out, total, memories, state, size, row, rank, patience, eps,
    RANKS: tl.constexpr, PADDED_RANKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    PROGRAMS: tl.constexpr, PLACE_BYTES: tl.constexpr,
):  # fmt: skip
    """Program p adds up rows `p * ROWS .. (p + 1) * ROWS` of `row` elements each, `size` in all; with NORM each is
    normed after the residual is added.

    memories: int64 [RANKS], addresses of every rank's memory: signals int32 [2, PROGRAMS], places [2, PROGRAMS].
    state: int32 [1 + PROGRAMS, 4] of this rank: whether a wait was given up; for each program which place is next, and
    how many signals each of the two has had so far.
    """
    program = tl.program_id(0)
    mine = state + (1 + program) * 4
    turn = tl.load(mine)
    wanted = tl.load(mine + 1 + turn) + (RANKS - 1)
    failed = tl.load(state)
    which = turn * PROGRAMS + program
    place = 2 * PROGRAMS * 4 + which.to(tl.int64) * PLACE_BYTES
    kind: tl.constexpr = x.dtype.element_ty

    column = tl.arange(0, BLOCK)[None, :]
    line = tl.arange(0, ROWS)[:, None]
    inside = line * BLOCK + column
    element = (program.to(tl.int64) * ROWS + line) * row + column
    mask = (column < row) & (element < size)
    value = tl.load(x + element, mask=mask, other=0.0)
    own = tl.multiple_of((tl.load(memories + rank) + place).to(tl.pointer_type(kind)), 16)
    tl.store(own + inside, value, mask=mask)

    # All threads have written before one of them says so; who sees the signal then sees the values.
    tl.debug_barrier()
    peer = tl.arange(0, PADDED_RANKS)
    others = (peer < RANKS) & (peer != rank)
    signals = tl.load(memories + peer, mask=others, other=0).to(tl.pointer_type(tl.int32)) + which
    tl.atomic_add(signals, 1, mask=others, sem="release", scope="sys")

    arrived = tl.load(memories + rank).to(tl.pointer_type(tl.int32)) + which
    left = tl.where(failed == 0, patience, 1)
    # Differences, since the counts wrap around.
    missing = wanted - tl.atomic_add(arrived, 0, sem="acquire", scope="sys")
    while (missing > 0) & (left > 0):
        missing = wanted - tl.atomic_add(arrived, 0, sem="acquire", scope="sys")
        left -= 1
    if missing > 0:
        tl.store(state, 1)
    tl.debug_barrier()

    added = tl.zeros((ROWS, BLOCK), tl.float32)
    for other in tl.static_range(RANKS):
        theirs = tl.multiple_of((tl.load(memories + other) + place).to(tl.pointer_type(kind)), 16)
        added += tl.load(theirs + inside, mask=mask, other=0.0).to(tl.float32)
    result = added.to(kind)
    if NORM:
        result = (result.to(tl.float32) + tl.load(residual + element, mask=mask, other=0.0).to(tl.float32)).to(kind)
        tl.store(total + element, result, mask=mask)
        wide = result.to(tl.float32)
        scale = tl.load(weight + column, mask=column < row, other=0.0).to(tl.float32)
        result = (wide * tl.rsqrt(tl.sum(wide * wide, 1) / row + eps)[:, None] * scale).to(kind)
    tl.store(out + element, result, mask=mask)
    tl.store(mine + 1 + turn, wanted)
    tl.store(mine, 1 - turn)


class SymmetricMemory:
    """All-reduce of small tensors over memory that the GPUs of one machine share.

    All ranks make it at the same time, and call the same methods in the same order on one stream at a time.

    Args:
        group: its ranks, 2 to 8, one process each, with its tensors on this rank's GPU.
        device: this rank's GPU. All processes see the same GPUs.
        max_bytes: the largest tensor that ``fits``; beyond, NCCL is faster.
        patience: about how many seconds a kernel waits for the other ranks before it gives up.

    Raises:
        ValueError: the number of ranks, or ``max_bytes``.
        GroupError: the memory cannot be shared, on any of the ranks; all of them raise.
    """

    def __init__(self, group: Group, device: torch.device, *, max_bytes: int = 2 << 20, patience: float = 10.0) -> None:
        if not 2 <= group.size <= 8:
            raise ValueError(f"memory is shared by 2 to 8 ranks, the group has {group.size}")
        if not 0 < max_bytes <= 2 * _PROGRAMS * _MAX_ELEMENTS:
            raise ValueError(f"max_bytes is 1 to {2 * _PROGRAMS * _MAX_ELEMENTS}, given {max_bytes}")
        self.rank, self.size, self.max_bytes = group.rank, group.size, max_bytes
        self._patience = max(1, min(int(patience * _LOOKS_PER_SECOND), 2**31 - 1))
        self._state = torch.zeros(1 + _PROGRAMS, 4, dtype=torch.int32, device=device)
        self._memories = torch.tensor(_share(group, device), dtype=torch.int64, device=device)

    def fits(self, t: Tensor) -> bool:
        """Whether ``all_reduce`` takes the tensor; depends on shape, strides and dtype only."""
        return t.dtype in _DTYPES and t.is_contiguous() and 0 < t.nbytes <= self.max_bytes

    def fits_norm(self, x: Tensor) -> bool:
        """Whether ``all_reduce_add_rms_norm`` takes x."""
        return self.fits(x) and x.dim() == 2 and _rows_each(x.shape[0]) * _padded(x.shape[1]) <= _MAX_ELEMENTS

    def all_reduce(self, t: Tensor) -> Tensor:
        """The sum of every rank's tensor, added up in fp32, in t's dtype; t stays.

        Raises:
            ValueError: it does not fit.
        """
        if not self.fits(t):
            raise ValueError(f"all_reduce: {_described(t)} does not fit: see SymmetricMemory.fits")
        count = t.numel()
        block = 2048
        while block * _PROGRAMS < count:
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
        each = _rows_each(rows)
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
        self, programs: int, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, size: int,
        row: int, eps: float, rows: int, block: int, norm: bool,
    ) -> None:  # fmt: skip
        all_reduce_kernel[(programs,)](
            x, residual, weight, out, total, self._memories, self._state, size, row, self.rank, self._patience, eps,
            RANKS=self.size, PADDED_RANKS=triton.next_power_of_2(self.size), ROWS=rows, BLOCK=block,
            NORM=norm, PROGRAMS=_PROGRAMS, PLACE_BYTES=_PLACE_BYTES, num_warps=max(1, min(16, rows * block // 256)),
        )  # fmt: skip


def _rows_each(rows: int) -> int:
    """Rows of a program, so that there are programs enough."""
    return int(triton.next_power_of_2(-(-rows // _PROGRAMS)))


def _padded(width: int) -> int:
    return max(256, int(triton.next_power_of_2(width)))


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _described(t: Tensor) -> str:
    return f"{t.dtype} {tuple(t.shape)} with strides {t.stride()}"


def _share(group: Group, device: torch.device) -> list[int]:
    """Addresses, in this process, of the memory of every rank: cleared, and open to all.

    It stays until the process ends: while any rank may still read it, it must not go.
    """
    problem, handle, own = "", bytes(ctypes.sizeof(_Handle)), 0
    cuda: _Cuda | None = None
    with torch.cuda.device(device):
        try:
            cuda = _Cuda()
            own, handle = cuda.allocate(_MEMORY_BYTES)
        except RuntimeError as error:
            problem = str(error)
        # One row of bytes a rank: its machine, its handle.
        message = torch.frombuffer(bytearray(_machine() + handle), dtype=torch.uint8)[None].to(device)
        rows = [bytes(row) for row in group.all_gather(message).cpu().tolist()]
        addresses = []
        for rank, row in enumerate(rows):
            machine, theirs = row[:16], row[16:]
            if machine != _machine():
                problem = problem or f"rank {rank} is on another machine"
            elif not any(theirs):
                problem = problem or f"rank {rank} has no memory to share"
            elif cuda is not None and not problem:
                try:
                    addresses.append(own if rank == group.rank else cuda.open(theirs))
                except RuntimeError as error:
                    problem = str(error)
        # Either all ranks go on or none.
        failed = group.all_reduce(torch.tensor([float(bool(problem))], device=device), op="max")
    if float(failed):
        raise GroupError(f"rank {group.rank}: memory is not shared: {problem or 'another rank has failed'}")
    return addresses


def _machine() -> bytes:
    """16 bytes that tell machines apart, and boots."""
    return hashlib.md5(Path("/proc/sys/kernel/random/boot_id").read_bytes(), usedforsecurity=False).digest()


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = [("bytes", ctypes.c_char * 64)]


class _Cuda:
    """The calls of the CUDA runtime that PyTorch does not offer: memory that another process can open."""

    _LAZY_PEER_ACCESS = 1

    def __init__(self) -> None:
        with open("/proc/self/maps") as maps:
            loaded = {line.split()[-1] for line in maps if "libcudart" in line}
        if not loaded:
            raise RuntimeError("PyTorch has not loaded the CUDA runtime (libcudart)")
        self._library = ctypes.CDLL(min(loaded))

    def allocate(self, size: int) -> tuple[int, bytes]:
        """Cleared memory of the current device: its address, and the handle by which others open it."""
        pointer, handle = ctypes.c_void_p(), _Handle()
        self._call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(size))
        self._call("cudaMemset", pointer, ctypes.c_int(0), ctypes.c_size_t(size))
        self._call("cudaDeviceSynchronize")
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
        return int(pointer.value or 0), bytes(handle)

    def open(self, handle: bytes) -> int:
        """The address, for the current device, of another process's memory."""
        pointer = ctypes.c_void_p()
        given = _Handle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), given, ctypes.c_uint(self._LAZY_PEER_ACCESS))
        return int(pointer.value or 0)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            text = self._library.cudaGetErrorString
            text.restype = ctypes.c_char_p
            raise RuntimeError(f"{name}: {text(code).decode()}")
