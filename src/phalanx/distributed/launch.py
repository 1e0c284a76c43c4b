"""Starting the processes of ranks 1 .. size-1 from rank 0, watching them, ending them."""

from __future__ import annotations

import inspect
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from phalanx.distributed.rendezvous import Rendezvous

_POLL_SECONDS = 0.1
_STDERR_LINES = 20
# Seconds between SIGTERM and SIGKILL, and those that the other ranks have to fail by themselves when one has died.
_TERM_SECONDS = 2.0
_LEFT_SECONDS = 5.0


@dataclass(frozen=True)
class Death:
    """A rank that ended with an error: its exit code (negative: the signal) and the end of its standard error."""

    rank: int
    code: int
    stderr: str

    @property
    def reason(self) -> str:
        how = (
            f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with exit code {self.code}"
        )
        last = self.stderr.strip().rpartition("\n")[2].strip()
        return f"{how}: {last}" if last else how

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}"


@dataclass
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_STDERR_LINES))
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._pass_on, name=f"stderr of rank {self.rank}", daemon=True)
        self.reader.start()

    def _pass_on(self) -> None:
        for line in self.process.stderr or ():
            text = line.decode(errors="replace")
            self.tail.append(text)
            sys.stderr.write(f"[rank {self.rank}] {text}")

    def death(self) -> Death:
        self.reader.join(0.5)
        return Death(self.rank, self.process.returncode, "".join(self.tail))


@dataclass
class _World:
    """What the watching thread and the owner share. The thread holds this, never the owner."""

    children: list[_Child] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    ending: threading.Lock = field(default_factory=threading.Lock)


class Ranks:
    """Ranks 1 .. `size` - 1, each `python -m MODULE ARGS`, with this process as rank 0 (`rendezvous` is its place).

    They find their place through `Rendezvous.from_env()`, and import what this process can import. Their standard error
    is passed on line by line. They end when this process ends, however it does. `env` adds to their environment.

    `on_death` is called, in a thread of its own, with a `Death` for every rank that ends with an error before `close`;
    a bound method is held weakly. The ranks that are left have 5 s to fail by themselves, then they are ended. A rank
    that ends with exit code 0 has ended well.
    """

    def __init__(
        self,
        size: int,
        module: str,
        args: Sequence[str] = (),
        *,
        on_death: Callable[[Death], None] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"a world has at least 1 rank, got {size}")
        self.rendezvous = Rendezvous.host(size)
        self._world = _World()
        self._finalizer = weakref.finalize(self, _end, self._world, 0.0)
        command = [sys.executable, "-P", "-m", "phalanx.distributed.child", module, *args]
        environments = [_environment(self.rendezvous, rank, env or {}) for rank in range(1, size)]
        listener = weakref.WeakMethod(on_death) if inspect.ismethod(on_death) else lambda: on_death
        started: Future[None] = Future()
        watch = (self._world, self.rendezvous, command, environments, listener, started)
        self._watcher = threading.Thread(target=_start_and_watch, args=watch, name="rank watch", daemon=True)
        self._watcher.start()
        try:
            started.result()
        except BaseException:
            self.close(grace=0.0)
            raise

    @property
    def deaths(self) -> list[Death]:
        """The ranks that ended with an error before `close`, first one first."""
        return list(self._world.deaths)

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1 .. size-1."""
        return [child.process.pid for child in self._world.children]

    def close(self, grace: float = 5.0) -> None:
        """End the ranks: `grace` s to end by themselves (having been told to), then SIGTERM, 2 s later SIGKILL.

        Returns when none is left. Closing twice is fine.
        """
        _end(self._world, grace)
        self._finalizer.detach()
        self._watcher.join()


def _environment(rendezvous: Rendezvous, rank: int, extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, plus the place of `rank`, what it may import and its share of the processors."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": str(max(1, cores // rendezvous.size)),
        **{name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")},
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(rendezvous.size),
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(rendezvous.port),
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        **extra,
    }


def _start_and_watch(
    world: _World,
    rendezvous: Rendezvous,
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    listener: Callable[[], Callable[[Death], None] | None],
    started: Future[None],
) -> None:
    """Start the ranks and stay until all have ended: Linux ends a child with the *thread* that started it."""
    try:
        for rank, env in enumerate(environments, start=1):
            # A session of its own keeps a Ctrl-C in the terminal from the ranks: rank 0 decides how they end.
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
            world.children.append(_Child(rank, process))
        started.set_result(None)
    except BaseException as error:
        started.set_exception(error)
    place = rendezvous.apart()
    running = list(world.children)
    end_at = math.inf
    while running:
        for child in [child for child in running if child.process.poll() is not None]:
            running.remove(child)
            if child.process.returncode != 0 and not world.closing.is_set():
                death = child.death()
                world.deaths.append(death)
                place.report_death(death.rank, death.reason)
                if (listen := listener()) is not None:
                    threading.Thread(target=listen, args=(death,), name="rank death", daemon=True).start()
                end_at = min(end_at, time.monotonic() + _LEFT_SECONDS)
        if time.monotonic() > end_at:
            _end(world, 0.0)
        time.sleep(_POLL_SECONDS)


def _end(world: _World, grace: float) -> None:
    world.closing.set()
    with world.ending:
        _wait(world, grace)
        for child in world.children:
            child.process.terminate()
        _wait(world, _TERM_SECONDS)
        for child in world.children:
            child.process.kill()
            child.process.wait()
            child.reader.join(0.5)
            if child.process.stdin is not None:
                child.process.stdin.close()


def _wait(world: _World, seconds: float) -> None:
    """Return when all children have ended, or after `seconds`."""
    deadline = time.monotonic() + seconds
    for child in world.children:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
