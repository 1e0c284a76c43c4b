"""Where the processes of a group find each other: a store, and this process's place among them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from phalanx.distributed.group import GroupError

LOOPBACK = "127.0.0.1"


def under_torchrun(env: Mapping[str, str] | None = None) -> bool:
    """Whether this process was started as one rank of several, by torchrun or anything that sets the same variables."""
    env = os.environ if env is None else env
    return all(name in env for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


@dataclass(frozen=True)
class Rendezvous:
    """This process's rank of `size`, its rank on this machine, and the store that all ranks share.

    `address` is what this rank's sockets bind to: loopback where all ranks live on one machine, empty for the address
    of the host name. `port` is the store's.
    """

    store: dist.Store
    rank: int
    size: int
    local_rank: int
    address: str = ""
    port: int = 0

    @classmethod
    def host(cls, size: int) -> Rendezvous:
        """Rank 0 of `size`, with the store in this process, on a free port that only this machine reaches."""
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            LOOPBACK, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return cls(_own_part(store), 0, size, 0, LOOPBACK, port)

    @classmethod
    def from_env(cls, timeout: float = 120.0) -> Rendezvous:
        """The place that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT give, as torchrun and `launch` set them.

        Raises RuntimeError if they are not set, or if nobody answers there within `timeout` seconds.
        """
        if not under_torchrun():
            raise RuntimeError(
                "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set: start this with torchrun"
            )
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        address = LOOPBACK if os.environ["MASTER_ADDR"] in (LOOPBACK, "localhost", "::1") else ""
        return cls(
            _own_part(store),
            rank,
            size,
            int(os.environ.get("LOCAL_RANK", rank)),
            address,
            int(os.environ["MASTER_PORT"]),
        )

    def apart(self) -> Rendezvous:
        """`host`'s place over a connection of its own, for another thread: a store serves one call at a time."""
        store = dist.TCPStore(self.address, self.port, self.size, wait_for_workers=False)
        return replace(self, store=_own_part(store))

    def meet(self, timeout: float) -> None:
        """Return once every rank has come here. Raises GroupError if one has died or is not here after `timeout` s."""
        keys = [f"here/{r}" for r in range(self.size)]
        self.store.set(keys[self.rank], "")
        deadline = time.monotonic() + timeout
        while not self.store.check(keys):
            if dead := self.deaths():
                raise GroupError(f"the group did not form: {describe(dead)}")
            if time.monotonic() > deadline:
                absent = [r for r, key in enumerate(keys) if not self.store.check([key])]
                raise GroupError(f"the group did not form: no sign of ranks {absent} within {timeout:g} s")
            time.sleep(0.02)

    def report_death(self, rank: int, reason: str) -> None:
        """Tell every rank that one is gone."""
        self.store.set(f"dead/{rank}", reason)

    def deaths(self) -> dict[int, str]:
        """The ranks known to be gone, and why."""
        return {r: self.store.get(key).decode() for r in range(self.size) if self.store.check([key := f"dead/{r}"])}


def _own_part(store: dist.Store) -> dist.Store:
    # Under torchrun the store serves others as well.
    return dist.PrefixStore("phalanx", store)


def describe(dead: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank} {reason}" for rank, reason in dead.items())
