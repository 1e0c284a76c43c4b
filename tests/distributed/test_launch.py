import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from phalanx.distributed.launch import Death, Ranks

MODULE = "tests.distributed.launch_cases"


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def gone(pid: int) -> bool:
    """Whether the process has ended (one that nobody has waited for yet counts)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_ranks_get_their_place_and_are_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(3, MODULE, ["place", "and more"], env={"EXTRA": "yes"})
    ranks.close()
    lines = sorted(capfd.readouterr().err.splitlines())
    assert ranks.deaths == []
    assert lines == [f"[rank {r}] {r} {r} 3 127.0.0.1 1 yes and more" for r in (1, 2)]


def test_death_is_reported_within_a_second(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[float, Death]] = []
    happened = threading.Event()

    def on_death(death: Death) -> None:
        told.append((time.monotonic(), death))
        happened.set()

    ranks = Ranks(3, MODULE, ["sleep"], on_death=on_death)
    os.kill(ranks.pids[1], signal.SIGKILL)
    start = time.monotonic()
    assert happened.wait(5.0)
    (when, death), *more = told
    assert when - start < 1.0
    assert more == []
    assert (death.rank, death.code, str(death)) == (2, -9, "rank 2 was killed by SIGKILL")
    assert ranks.rendezvous.deaths() == {2: "was killed by SIGKILL"}
    ranks.close(grace=0.0)
    assert ranks.deaths == [death]


def test_exit_code_and_last_words() -> None:
    ranks = Ranks(3, MODULE, ["fail", "7"])
    assert eventually(lambda: len(ranks.deaths) > 0)
    ranks.close()
    assert ranks.deaths == [Death(1, 7, "first line\nlast line\n")]
    assert str(ranks.deaths[0]) == "rank 1 ended with exit code 7: last line"


def test_ranks_left_over_are_ended() -> None:
    ranks = Ranks(3, MODULE, ["sleep"])
    os.kill(ranks.pids[0], signal.SIGSEGV)
    assert eventually(lambda: gone(ranks.pids[1]), 9.0)
    ranks.close()
    assert [death.rank for death in ranks.deaths] == [1]


def test_close_is_firm_and_idempotent(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(2, MODULE, ["stubborn"])
    assert eventually(lambda: "ready" in capfd.readouterr().err)
    start = time.monotonic()
    ranks.close(grace=0.0)
    ranks.close()
    assert 1.5 < time.monotonic() - start < 5.0
    assert all(gone(pid) for pid in ranks.pids)
    assert ranks.deaths == []


def test_ranks_end_with_their_owner() -> None:
    ranks = Ranks(2, MODULE, ["sleep"])
    (pid,) = ranks.pids
    del ranks
    gc.collect()
    assert gone(pid)


def test_bound_method_does_not_keep_its_owner() -> None:
    class Owner:
        def __init__(self) -> None:
            self.ranks = Ranks(2, MODULE, ["sleep"], on_death=self.on_death)

        def on_death(self, death: Death) -> None: ...

    owner = Owner()
    (pid,) = owner.ranks.pids
    del owner
    gc.collect()
    assert gone(pid)


def test_ranks_outlive_the_thread_that_asked_for_them() -> None:
    made: list[Ranks] = []
    thread = threading.Thread(target=lambda: made.append(Ranks(2, MODULE, ["sleep"])))
    thread.start()
    thread.join()
    (ranks,) = made
    time.sleep(1.0)
    assert not gone(ranks.pids[0])
    ranks.close(grace=0.0)


@pytest.mark.parametrize("how", ["killed", "return", "raise", "leave at once"])
def test_no_rank_outlives_its_parent(how: str) -> None:
    end = "wait" if how == "killed" else how
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", MODULE, "parent", end]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as program:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(pids) == 2
        if how == "killed":
            program.kill()
        program.wait(20.0)
    assert eventually(lambda: all(gone(pid) for pid in pids), 3.0)


def test_a_rank_ends_with_the_pipe_alone() -> None:
    """The portable half: nobody dies, only the pipe that stands for the parent is closed."""
    command = [sys.executable, "-m", "phalanx.distributed.child", MODULE, "sleep"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(10.0) == 1


def test_world_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 rank"):
        Ranks(0, MODULE)
