"""Which engine gets a prompt."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from phalanx.config import ConfigError, engine_config
from phalanx.engine.statistics import EngineStatistics, total
from phalanx.server import engines
from phalanx.server.routing import Router

IDLE = {0: (0, 0.0), 1: (0, 0.0), 2: (0, 0.0)}


def prompt(seed: int, length: int = 200) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(1000) for _ in range(length)]


def test_a_beginning_stays_where_it_was_seen() -> None:
    router = Router(chunk=16)
    homes = {seed: router.pick(prompt(seed), "", IDLE) for seed in range(30)}
    assert len(set(homes.values())) == 3
    for seed, home in homes.items():
        assert router.pick([*prompt(seed), 5, 6, 7], "", IDLE) == home
        assert router.pick([*prompt(seed)[:100], *prompt(seed + 1000)], "", IDLE) == home


def test_salts_share_nothing() -> None:
    router = Router(chunk=16)
    picked = Counter(router.pick(prompt(1), f"salt {number}", IDLE) for number in range(300))
    assert max(picked.values()) == 100
    assert {router.pick(prompt(1), "", IDLE) for _ in range(9)} == {router.pick(prompt(1), "", IDLE)}


def test_a_busy_engine_gives_the_beginning_away() -> None:
    router, long = Router(chunk=16), prompt(1, 1600)
    home = router.pick(long, "", IDLE)
    other = (home + 1) % 3
    loads = {**IDLE, **dict.fromkeys(IDLE, (40, 0.0))}
    # Twenty answers more than elsewhere are less than the beginning; thirty are more.
    assert router.pick(long, "", {**loads, home: (60, 0.0)}) == home
    assert router.pick(long, "", {**loads, home: (70, 0.0), other: (39, 0.0)}) == other
    # Now both have seen it: the less busy one.
    assert router.pick(long, "", {home: (1, 0.0), other: (2, 0.0)}) == home
    assert router.pick(long, "", {home: (3, 0.0), other: (2, 0.0)}) == other


def test_one_without_room_is_left_alone() -> None:
    router = Router(chunk=16)
    home = router.pick(prompt(1), "", IDLE)
    assert router.pick(prompt(1), "", {**IDLE, home: (0, 0.89)}) == home
    assert router.pick(prompt(1), "", {**IDLE, home: (0, 1.0)}) != home


def test_equals_take_turns_and_the_least_busy_is_first() -> None:
    router = Router(chunk=16)
    assert Counter(router.pick([seed], "", IDLE) for seed in range(30)) == {0: 10, 1: 10, 2: 10}
    assert {router.pick([seed], "", {0: (2, 0.0), 1: (1, 0.0), 2: (2, 0.0)}) for seed in range(5)} == {1}


def test_only_those_that_live_are_picked_and_what_they_knew_is_forgotten() -> None:
    router = Router(chunk=16)
    home = router.pick(prompt(1), "", IDLE)
    others = {place: load for place, load in IDLE.items() if place != home}
    assert router.pick(prompt(1), "", others) in others
    for place in IDLE:
        router.forget(place)
    assert len(router) == 0
    with pytest.raises(ValueError, match="no engine"):
        router.pick([1], "", {})


def test_memory_is_bounded_and_the_latest_stay() -> None:
    router = Router(chunk=4, remembered=100)
    for seed in range(200):
        last = router.pick(prompt(seed, 40), "", IDLE)
        assert len(router) <= 100
    assert router.pick(prompt(199, 40), "", IDLE) == last
    router.pick(prompt(500, 4000), "", IDLE)
    assert len(router) == 100


def test_engines_on_gpus_get_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = engine_config(tensor_parallel_size=2)
    assert [environment for _, environment in engines._shares(two, 2)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    assert engines._shares(two, 1) == [({}, {})]
    with pytest.raises(ConfigError, match=r"3 engines of 2 GPUs each need 6, and this machine has 4"):
        engines._shares(two, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-aa")
    assert [environment["CUDA_VISIBLE_DEVICES"] for _, environment in engines._shares(engine_config(), 2)] == [
        "5",
        "GPU-aa",
    ]


def test_engines_on_a_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    assert engines._shares(engine_config(device="cpu"), 3) == [({"num_threads": 2}, {})] * 3
    assert engines._shares(engine_config(device="cpu", num_threads=5), 3) == [({}, {})] * 3


def test_counts_of_an_engine_that_has_ended_stay() -> None:
    one = EngineStatistics(3, 4, 50, 100, 60, 70, 8, 900, 9)
    both = total([one.ended(), one])
    assert both == EngineStatistics(3, 4, 50, 100, 120, 140, 16, 1800, 18)
    assert both.kv_usage == 0.5 and one.ended().kv_usage == 0
