"""Generation: the prompts of one HTTP request on their way through the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from phalanx.engine.pooling import Pooling
from phalanx.engine.sampling_params import SamplingParams
from phalanx.server.edge import RequestRecord
from phalanx.server.engine_client import EngineDead, Mailbox
from phalanx.server.engine_messages import Beginning, Piece
from phalanx.server.errors import ApiError
from phalanx.server.service import Service


@dataclass(frozen=True)
class Job:
    """One prompt, checked, with its settings; with ``pooling``, its embedding is wanted instead of an answer."""

    token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    pooling: Pooling | None = None


class Generation:
    """Runs jobs together; whoever leaves early aborts what is left of them.

    Args:
        jobs: of one request.
        record: the request's, which gets its tokens and times.
        streamed: pieces as they are drawn, or whole answers.

    Attributes:
        completion_tokens: drawn so far, of all answers.
        cached_tokens: prompt tokens found in the prefix cache.
    """

    def __init__(self, service: Service, jobs: Sequence[Job], record: RequestRecord, streamed: bool) -> None:
        self._service = service
        self.jobs = list(jobs)
        self.record = record
        self.streamed = streamed
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._last_token_at: dict[tuple[int, int], float] = {}

    @property
    def prompt_tokens(self) -> int:
        return sum(len(job.token_ids) for job in self.jobs)

    async def pieces(self) -> AsyncGenerator[list[tuple[int, Piece]], None]:
        """(job's place, piece) of everything that has come meanwhile, until all answers have ended.

        Raises:
            ApiError: 400 refused by the engine, or too many, 408 too slow, 429 or 503 not let in, 500 an answer failed,
                503 the engine has ended.
        """
        service, engine = self._service, self._service.engine
        answers = sum(job.params.n for job in self.jobs)
        service.check_open(answers)
        mailbox, loop = Mailbox(), asyncio.get_running_loop()
        timeout = service.settings.request_timeout
        timer = None if timeout is None else loop.call_later(timeout, mailbox.fail, _too_slow(timeout))
        places: dict[int, int] = {}
        left: dict[int, int] = {}
        service.open_answers += answers
        try:
            for place, job in enumerate(self.jobs):
                params = job.params.model_dump(mode="json", exclude_defaults=True)
                number = engine.submit(mailbox, job.token_ids, params, job.cache_salt, self.streamed, job.pooling)
                places[number], left[number] = place, job.params.n
            while left:
                found = []
                for piece in await mailbox.get():
                    if piece.finish_reason is not None:
                        left[piece.number] -= 1
                        if not left[piece.number]:
                            del left[piece.number]
                            engine.forget(piece.number, aborted=False)
                    self._count(piece, places[piece.number])
                    found.append((places[piece.number], piece))
                yield found
        except EngineDead as error:
            raise ApiError(503, str(error), code="engine_dead", headers={"Retry-After": "5"}) from None
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        finally:
            service.open_answers -= answers
            if timer is not None:
                timer.cancel()
            for number in left:
                engine.forget(number, aborted=True)
                service.metrics.aborted += 1

    def _count(self, piece: Piece, place: int) -> None:
        metrics, record, now = self._service.metrics, self.record, time.monotonic()
        if piece.beginning is not None:
            self._count_beginning(piece.beginning, place)
        new = len(piece.token_ids)
        self.completion_tokens += new
        record.completion_tokens += new
        key = (place, piece.index)
        if self.streamed:
            before = self._last_token_at.get(key)
            if new and before is not None:
                metrics.inter_token.observe((now - before) / new, new)
            self._last_token_at[key] = now
        if piece.finish_reason is None:
            return
        metrics.finished[piece.finish_reason] += 1
        record.finish_reasons.append(piece.finish_reason)
        metrics.whole.observe(now - record.began)
        if not self.streamed and new > 1 and record.first_token_seconds is not None:
            metrics.inter_token.observe((now - record.began - record.first_token_seconds) / (new - 1), new - 1)
        if piece.finish_reason == "error":
            raise _failed(piece, self.jobs[place].params)

    def _count_beginning(self, beginning: Beginning, place: int) -> None:
        metrics, record = self._service.metrics, self.record
        size = len(self.jobs[place].token_ids)
        metrics.prompt_tokens += size
        record.prompt_tokens += size
        self.cached_tokens += beginning.cached_tokens
        record.cached_tokens = self.cached_tokens
        queued, first = beginning.scheduled_at - record.began, beginning.first_token_at - record.began
        metrics.queued.observe(queued)
        if not self.jobs[place].pooling:
            metrics.first_token.observe(first)
        if record.first_token_seconds is None:
            record.queue_seconds, record.first_token_seconds = queued, first

    def usage(self) -> dict[str, object]:
        """Tokens, in OpenAI's shape."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def _too_slow(timeout: float) -> ApiError:
    return ApiError(408, f"the request took longer than the {timeout:g} s that it may", code="request_timeout")


def _failed(piece: Piece, params: SamplingParams) -> ApiError:
    """An answer that the engine gave up. Settings that forbid tokens may have left none to draw: then it is theirs."""
    forbids = params.guide is not None or params.bad_words or params.min_tokens
    return ApiError(400 if forbids else 500, f"the answer cannot go on: {piece.error}")
