"""Ranks that are processes: gloo for tensors on the CPU, NCCL for tensors on GPUs.

Built from a store directly. `torch.distributed`'s default group is neither used nor made, so several groups can live in
one process, beside whatever the program around them does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from phalanx.distributed.group import Group, GroupError, Reduction, check_source, gather_sizes, own_payload
from phalanx.distributed.rendezvous import Rendezvous, describe

if TYPE_CHECKING:
    from phalanx.distributed.symmetric import SymmetricMemory

log = logging.getLogger("phalanx")

# A rank that waits for the next message may wait as long as nobody asks for anything.
_IDLE = timedelta(days=365)
# A message and its length travel together in one broadcast if they fit into this many bytes.
_HEAD_BYTES = 4096
_LENGTH_BYTES = 8
# Seconds within which all ranks that failed in the same collective have said so; who has not is at fault.
_VERDICT_SECONDS = 2.0
# Seconds that closing waits for NCCL to end, which it does at once where no graph holds its kernels.
_ABORT_SECONDS = 2.0


class ProcessGroup(Group):
    """One rank, in a process of its own.

    `device`: where this rank's tensors are; it decides between gloo and NCCL. `timeout`: seconds that a collective may
    take. `start_timeout`: seconds to wait for the other ranks to appear. `name`: the same on all ranks; groups of one
    name that follow each other on one store do not mix. `shared_memory`: tensors on GPUs, of more than two ranks small
    ones, are added up over memory that the GPUs share, where they can. Raises GroupError if the group does not form.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        device: torch.device | str = "cpu",
        *,
        timeout: float = 60.0,
        start_timeout: float = 120.0,
        name: str = "group",
        shared_memory: bool = False,
    ) -> None:
        self.rank = rendezvous.rank
        self.size = rendezvous.size
        self._rendezvous = rendezvous
        self._timeout = timedelta(seconds=timeout)
        self._fault: str | None = None
        device = torch.device(device)
        if device.type != "cpu" and not (device.type == "cuda" and dist.is_nccl_available()):
            raise ValueError(f"no process group for device {device}: expected cpu, or cuda where PyTorch has NCCL")
        rendezvous.meet(start_timeout)
        # Every rank makes its groups in the same order: the count of those it made tells them apart.
        count = rendezvous.store.add(f"{name}/count/{self.rank}", 1)
        self._store = dist.PrefixStore(f"{name}/{count}", rendezvous.store)
        self._host: Any = None
        self._data: Any = None
        self._stopping = threading.Lock()
        self._stopper: threading.Thread | None = None
        self._shared: SymmetricMemory | None = None
        try:
            self._host = self._gloo()
            self._data = self._host if device.type == "cpu" else self._nccl(device)
        except RuntimeError as error:
            self._fail("connecting", str(error))
            raise GroupError(self._fault) from error
        if shared_memory:
            self._shared = self._shared_memory(device)
            self.fault_flag = None if self._shared is None else self._shared.fault_flag

    def _shared_memory(self, device: torch.device) -> SymmetricMemory | None:
        """What adds up tensors faster than NCCL; None where the GPUs do not see each other's memory."""
        if device.type != "cuda" or self.size < 2 or find_spec("triton") is None:
            return None
        from phalanx.distributed.symmetric import SymmetricMemory

        try:
            return SymmetricMemory(self, device)
        except (GroupError, ValueError) as error:
            self.check()
            log.info("tensors are added up by NCCL: %s", error)
            return None

    def _gloo(self) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self._timeout
        options._devices = [gloo.create_device(hostname=self._rendezvous.address)]
        return gloo(dist.PrefixStore("gloo", self._store), self.rank, self.size, options)

    def _nccl(self, device: torch.device) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        group = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", self._store), self.rank, self.size, options)
        group.eager_connect_single_device(device)
        return group

    def all_reduce(self, t: Tensor, op: Reduction = "sum") -> Tensor:
        if self._shared is not None and op == "sum" and self._shared.fits(t):
            self.check()
            return self._shared.all_reduce(t)
        out = t.detach().contiguous()
        if out.numel():
            options = dist.AllreduceOptions()
            if op == "max":
                options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
            options.asyncOp = False
            self._run(f"all_reduce of {list(t.shape)}", lambda: self._data.allreduce([out], options))
        return out

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        if self._shared is None or not self._shared.fits_norm(x):
            return None
        self.check()
        return self._shared.all_reduce_add_rms_norm(x, residual, weight, eps)

    def all_gather(self, t: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        dim, sizes = gather_sizes(self, t, dim, sizes)
        # The back ends gather equal parts: pad to the widest, cut afterwards.
        mine = t.detach().contiguous()
        if mine.shape[dim] < max(sizes):
            shape = [*t.shape[:dim], max(sizes), *t.shape[dim + 1 :]]
            mine = t.new_zeros(shape)
            mine.narrow(dim, 0, t.shape[dim]).copy_(t.detach())
        out = mine.new_empty((self.size, *mine.shape))
        if out.numel():
            options = AllgatherOptions()
            options.asyncOp = False
            what = f"all_gather of {sizes} along dim {dim}"
            self._run(what, lambda: self._data._allgather_base(_bytes(out), _bytes(mine), options))
        if dim == 0 and min(sizes) == max(sizes):
            return out.flatten(0, 1)
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(out, sizes, strict=True)], dim)

    def broadcast(self, t: Tensor, src: int = 0) -> Tensor:
        check_source(self, src)
        buffer = t.detach().contiguous()
        if buffer.numel():
            options = self._broadcast_options(src, self._timeout)
            self._run(f"broadcast from rank {src}", lambda: self._data.broadcast([_bytes(buffer)], options))
        if self.rank != src and not t.is_contiguous():
            t.detach().copy_(buffer)
        return t

    def broadcast_bytes(self, payload: bytes | None = None) -> bytes:
        if self.rank == 0:
            payload = own_payload(payload)
            message = bytearray(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload)
            message.extend(bytes(max(0, _HEAD_BYTES - len(message))))
            self._send_bytes(torch.frombuffer(message, dtype=torch.uint8)[:_HEAD_BYTES], self._timeout)
            if len(message) > _HEAD_BYTES:
                self._send_bytes(torch.frombuffer(message, dtype=torch.uint8)[_HEAD_BYTES:], self._timeout)
            return payload
        head = torch.empty(_HEAD_BYTES, dtype=torch.uint8, device="cpu")
        self._send_bytes(head, _IDLE)
        received = head.numpy().tobytes()
        end = _LENGTH_BYTES + int.from_bytes(received[:_LENGTH_BYTES], "little")
        if end > _HEAD_BYTES:
            rest = torch.empty(end - _HEAD_BYTES, dtype=torch.uint8, device="cpu")
            self._send_bytes(rest, self._timeout)
            received += rest.numpy().tobytes()
        return received[_LENGTH_BYTES:end]

    def _send_bytes(self, buffer: Tensor, timeout: timedelta) -> None:
        options = self._broadcast_options(0, timeout)
        self._run("broadcast_bytes", lambda: self._host.broadcast([buffer], options))

    @staticmethod
    def _broadcast_options(src: int, timeout: timedelta) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        options.timeout = timeout
        options.asyncOp = False
        return options

    def barrier(self, timeout: float | None = None) -> None:
        options = dist.BarrierOptions()
        options.timeout = self._timeout if timeout is None else timedelta(seconds=timeout)
        options.asyncOp = False
        self._run("barrier", lambda: self._host.barrier(options))

    def _run(self, what: str, start: Callable[[], Any]) -> None:
        self.check()
        work = None
        try:
            work = start()
            if work is not None:
                work.wait()
        except RuntimeError as error:
            work = None
            self._fail(what, str(error))
            raise GroupError(self._fault) from error

    def _fail(self, what: str, error: str) -> None:
        known = self._fault is not None
        if not known:
            self._fault = f"{what} failed on rank {self.rank}"
        self._stop_kernels()
        # With the last reference (a piece of work holds one too) the sockets close: who waits for this rank fails now.
        self._host = self._data = None
        if not known:
            first_line = error.partition("\n")[0]
            self._fault = f"{what} failed on rank {self.rank}: {self._culprit()} ({first_line})"

    def _culprit(self) -> str:
        """Who is at fault: a rank that is known to have died, else one that does not say that it failed as well."""
        try:
            self._store.set(f"failed/{self.rank}", "")
            deadline = time.monotonic() + _VERDICT_SECONDS
            while silent := [r for r in range(self.size) if not self._store.check([f"failed/{r}"])]:
                if dead := self._rendezvous.deaths():
                    return describe(dead)
                if time.monotonic() > deadline:
                    return f"no answer from ranks {silent}"
                time.sleep(0.05)
            return "all ranks are there"
        except RuntimeError:
            return "the store is gone, and the process that holds it (rank 0 or torchrun) with it"

    def abort(self, reason: str) -> None:
        if self._fault is None:
            self._fault = reason
        self._stop_kernels()

    def _stop_kernels(self) -> None:
        """Ends NCCL's kernels that wait for a rank which may never come: the group would wait for them when it goes.

        They end soon. The call that ends them returns only when no graph holds any: it has a thread of its own.
        """
        # The thread that watches the other ranks and the one that works may both find that one has died.
        with self._stopping:
            data = self._data
            if self._stopper is not None or data is None or data is self._host:
                return
            stopper = threading.Thread(target=data.abort, name="phalanx-abort", daemon=True)
            stopper.start()
            self._stopper = stopper

    def check(self) -> None:
        if self._fault is not None:
            raise GroupError(self._fault)

    def close(self) -> None:
        # Not NCCL's shutdown: that one waits for the other ranks, which may never come.
        self.abort(f"the group was closed on rank {self.rank}")
        self._host = self._data = None
        if self._stopper is not None:
            self._stopper.join(_ABORT_SECONDS)


def _bytes(t: Tensor) -> Tensor:
    """The same memory as a run of bytes: what is only moved need not be of a type that a back end knows."""
    return t.view(-1).view(torch.uint8)
