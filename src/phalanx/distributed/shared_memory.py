"""Memory on GPUs of one machine that all ranks of a group see."""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path

import torch

from phalanx.distributed.group import Group, GroupError


def share(group: Group, device: torch.device, size: int) -> list[int]:
    """Addresses, in this process, of `size` bytes of memory of every rank: cleared, and open to all.

    It stays until the process ends: while any rank may still read it, it must not go.

    Raises:
        GroupError: the memory cannot be shared, on any of the ranks; all of them raise.
    """
    problem, handle, own = "", bytes(ctypes.sizeof(_Handle)), 0
    cuda: _Cuda | None = None
    with torch.cuda.device(device):
        try:
            cuda = _Cuda()
            own, handle = cuda.allocate(size)
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
