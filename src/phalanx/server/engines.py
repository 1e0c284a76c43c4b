"""Engines: all engines behind one port, as if they were one."""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import Any

import msgspec
import torch

from phalanx.config import ConfigError, EngineConfig, engine_config
from phalanx.engine.pooling import Pooling
from phalanx.engine.statistics import EngineStatistics, total
from phalanx.server.engine_client import EngineClient, EngineDead, EngineState, Mailbox
from phalanx.server.engine_messages import Ready
from phalanx.server.routing import Router


class Engines:
    """Starts engines of one model, each in processes of its own, and gives every prompt to one of them.

    Args:
        model: what another process can open.
        settings: of EngineConfig, for each.
        count: how many.
        restart: start one again when it has died.

    Raises:
        ConfigError: there are too few GPUs for so many.

    Attributes:
        clients: one an engine.
    """

    def __init__(self, model: str, settings: dict[str, Any], count: int = 1, restart: bool = False) -> None:
        config = engine_config(settings)
        shares = _shares(config, count)
        self._router = Router(config.block_size)
        self._starting = True
        self._placed: dict[int, tuple[int, int]] = {}
        self._answers = [0] * count
        numbers = itertools.count(1)
        self.clients = [
            EngineClient(model, {**settings, **more}, restart, environment, numbers, name, self._on_end)
            for name, (more, environment) in enumerate(shares)
        ]

    # -- how it stands with them

    @property
    def state(self) -> EngineState:
        """READY while one of them is, once all have been."""
        if self._starting:
            return EngineState.STARTING
        states = [client.state for client in self.clients]
        return EngineState.READY if EngineState.READY in states else states[0]

    @property
    def live(self) -> int:
        """Engines that take requests, or are loading for the first time."""
        good = {EngineState.READY, EngineState.STARTING}
        return sum(client.state in good for client in self.clients)

    @property
    def reason(self) -> str:
        """Why the last one that died has."""
        return next((client.reason for client in self.clients if client.reason), "")

    @property
    def ready(self) -> Ready | None:
        """What they said of themselves: the least context, the places of all that live. None before they were ready."""
        said = [client.ready for client in self.clients if client.ready is not None]
        if not said:
            return None
        places = sum(
            client.ready.max_num_seqs
            for client in self.clients
            if client.ready is not None and client.state is EngineState.READY
        )
        context = min(one.max_model_len for one in said)
        return msgspec.structs.replace(said[0], max_model_len=context, max_num_seqs=places, stats=self.stats)

    @property
    def stats(self) -> EngineStatistics | None:
        """The latest statistics of all together. None before there are any."""
        found = [client.stats for client in self.clients if client.stats is not None]
        return total(found) if found else None

    # -- their life

    async def start(self) -> None:
        """Starts all at once; returns when all are ready.

        Raises:
            EngineStartError: one could not be built; the others are ended then.
        """
        done = await asyncio.gather(*(client.start() for client in self.clients), return_exceptions=True)
        errors = [error for error in done if error is not None]
        if errors:
            await self.close()
            raise errors[0]
        self._starting = False

    async def close(self) -> None:
        """Ends all; requests that still run get EngineDead."""
        self._starting = False
        await asyncio.gather(*(client.close() for client in self.clients))

    def _on_end(self, name: int) -> None:
        self._router.forget(name)

    # -- requests

    def submit(
        self,
        mailbox: Mailbox,
        token_ids: list[int],
        params: dict[str, Any],
        cache_salt: str,
        streamed: bool,
        pooling: Pooling | None = None,
    ) -> int:
        """Sends a prompt to one of them; its pieces come into the mailbox under the number that is returned.

        Raises:
            EngineDead: there is none now.
        """
        if self.state is not EngineState.READY:
            raise EngineDead("the engine is starting" if self._starting else f"the engine has ended: {self.reason}")
        place = 0 if len(self.clients) == 1 else self._router.pick(token_ids, cache_salt, self._loads())
        number = self.clients[place].submit(mailbox, token_ids, params, cache_salt, streamed, pooling)
        answers = params.get("n", 1)
        self._placed[number] = (place, answers)
        self._answers[place] += answers
        return number

    def forget(self, number: int, aborted: bool) -> None:
        """Nobody waits for this request any more; with ``aborted``, it has not ended."""
        place, answers = self._placed.pop(number, (0, 0))
        self._answers[place] -= answers
        self.clients[place].forget(number, aborted)

    def give_up(self, error: Exception) -> None:
        """Ends everything that runs with this error."""
        for client in self.clients:
            client.give_up(error)

    def _loads(self) -> dict[int, tuple[int, float]]:
        return {
            place: (self._answers[place], client.stats.kv_usage if client.stats is not None else 0.0)
            for place, client in enumerate(self.clients)
            if client.state is EngineState.READY
        }


def _shares(config: EngineConfig, count: int) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """For each engine, settings and environment that give it its part of the machine."""
    if count == 1:
        return [({}, {})]
    ranks = config.tensor_parallel_size
    if config.device == "cpu" or not torch.cuda.is_available():
        threads = max(1, len(os.sched_getaffinity(0)) // (count * ranks))
        return [({} if config.num_threads is not None else {"num_threads": threads}, {})] * count
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(place) for place in range(torch.cuda.device_count())] if given is None else given.split(",")
    if len(devices) < count * ranks:
        raise ConfigError(
            f"{count} engines of {ranks} GPU{'s' * (ranks > 1)} each need {count * ranks}, and this machine has "
            f"{len(devices)}: start fewer (--data-parallel), or lower tensor_parallel_size"
        )
    return [
        ({}, {"CUDA_VISIBLE_DEVICES": ",".join(devices[place * ranks : (place + 1) * ranks])}) for place in range(count)
    ]
