"""EngineCore: requests in, tokens out. It turns schedules into steps, launches them, and reads what they drew.

Two loops stand side by side, with the same tokens. The plain one launches a step and reads it. The asynchronous one
launches step n + 1 before step n is read: input ids come from the device's token table, so only what depends on a
token's value (stop texts, end tokens) is known a step late, and the overshoot is discarded. What a guided
answer may go on with depends on its last token too: where a step has such rows, its sampling is launched only when the
step before is read, while its own forward runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from phalanx.engine.guides import token_masks
from phalanx.engine.inference_engine import InferenceEngine
from phalanx.engine.repetition import Repetition
from phalanx.engine.runner import StepResult
from phalanx.engine.sampler import RowLogprobs, SampledRows
from phalanx.engine.scheduler import Scheduler
from phalanx.engine.sequence import Request, Status
from phalanx.engine.step import (
    LOGITS_ALL,
    LOGITS_LAST,
    LOGITS_NONE,
    POOL_LAST,
    POOL_NONE,
    POOL_SUM,
    Masks,
    Row,
    Sampler,
    Step,
    Write,
)


@dataclass(frozen=True)
class Flight:
    """A launched step that has not been read: what it names stays alive until then."""

    step: Step
    requests: list[Request]
    result: StepResult


class EngineCore:
    """Runs requests to their end on an InferenceEngine.

    Args:
        engine: made with ``scheduled=True``.
        asynchronous: which loop.
    """

    def __init__(self, engine: InferenceEngine, asynchronous: bool) -> None:
        self.engine = engine
        self.kv = engine.kv
        self.scheduler = Scheduler(engine.kv, engine.max_num_seqs, engine.token_budget)
        self._repetition = Repetition(self.scheduler, engine.kv)
        self.asynchronous = asynchronous
        self._flight: Flight | None = None
        self._step_id = 0
        self.generated_tokens = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._flight is not None

    @property
    def steps(self) -> int:
        """Steps launched so far."""
        return self._step_id

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Ends a request in whatever state it is; a finished one stays as it is."""
        if not request.is_finished:
            self._finish(request, "abort")

    def step(self) -> list[Request]:
        """Launches and reads once; returns the requests that got tokens or ended.

        An exception, an interrupt included, may leave a step half done: it ends everything that runs, and a group of
        ranks with it, rather than let anybody wait for what will not come.
        """
        try:
            return self._step_asynchronous() if self.asynchronous else self._step_plain()
        except BaseException as error:
            self._give_up(f"a step of the engine was broken off by {type(error).__name__}: {error}")
            raise

    def _give_up(self, reason: str) -> None:
        group = self.engine.team.group
        if group.size > 1:
            group.abort(reason)
        self._flight = None
        self.kv.step_completed(self._step_id)
        for request in list(self.scheduler.running):
            request.error = reason
            self._finish(request, "error")

    def _step_plain(self) -> list[Request]:
        flight = self._launch(drained=True)
        if flight is None:
            return []
        flight, failed = self._sampled(flight)
        return failed + self._read(flight)

    def _step_asynchronous(self) -> list[Request]:
        following = self._launch(drained=self._flight is None)
        finished_flight, self._flight = self._flight, following
        touched = self._read(finished_flight) if finished_flight is not None else []
        if following is not None:
            self._flight, failed = self._sampled(following)
            touched += failed
        return touched

    def check_idle(self) -> None:
        """Raises RuntimeError if blocks or requests are left over when nothing runs."""
        self.kv.check()
        if not self.has_work and self.kv.pool.num_used:
            raise RuntimeError(f"{self.kv.pool.num_used} KV blocks are in use while no request runs")

    # -- launching

    def _launch(self, drained: bool) -> Flight | None:
        following = self._repetition.go_on()
        if following is None:
            return self._launch_scheduled(drained)
        requests, blocks = following
        step_id = self._step_id
        for request in requests:
            request.num_computed += 1
            request.last_step = step_id
            request.pending += 1
        self._step_id += 1
        step = Step(step_id, [], [], [], further=blocks)
        return Flight(step, requests, self.engine.executor.launch(step))

    def _launch_scheduled(self, drained: bool) -> Flight | None:
        scheduled = self.scheduler.schedule(drained)
        if not scheduled:
            return None
        rows, writes, samplers, masked = [], [], [], False
        for request, count in scheduled.items():
            if request.sent_blocks < 0:
                request.sent_blocks = 0
                writes.append(Write(request.slot, 0, list(request.tokens)))
                samplers.append((request.slot, sampler_of(request)))
            row = self._row(request, count)
            rows.append(row)
            request.num_computed += count
            request.last_step = self._step_id
            if row.draw:
                request.pending += 1
                masked = masked or request.guide is not None
        step = Step(self._step_id, rows, writes, samplers, masked=masked)
        self._step_id += 1
        requests = list(scheduled)
        self._repetition.begin(requests, rows, masked)
        return Flight(step, requests, self.engine.executor.launch(step))

    def _row(self, request: Request, count: int) -> Row:
        start, prompt_len = request.num_computed, request.prompt_len
        draw = start + count == len(request.tokens) + request.pending and request.max_tokens > 0
        logits, pool = LOGITS_LAST if draw else LOGITS_NONE, POOL_NONE
        if start < prompt_len:
            if request.params.prompt_logprobs is not None:
                logits = LOGITS_ALL
            if request.pooling == "mean":
                pool = POOL_SUM
            elif request.pooling and start + count == prompt_len:
                pool = POOL_LAST
        sent, held = request.sent_blocks, len(request.blocks[0])
        new: list[list[int]] = []
        if held > sent:
            request.sent_blocks = held
            new = [blocks[sent:] for blocks in request.blocks]
        return Row(request.slot, start, count, logits, draw, prompt_len, sent, new, pool)

    def _sampled(self, flight: Flight) -> tuple[Flight, list[Request]]:
        """The flight with its sampling launched; all tokens before it have been read. And the requests that ended
        because their guides cannot go on."""
        if not flight.step.masked:
            return flight, []
        places = [
            place
            for place, (request, row) in enumerate(zip(flight.requests, flight.step.rows, strict=True))
            if row.draw and request.guide is not None and not request.is_finished
        ]
        matchers = [flight.requests[place].guide for place in places]
        bits = token_masks(matchers, self.engine.model.vocab_size).tobytes() if matchers else b""
        ended = [flight.requests[place] for place in places if self._end_by_guide(flight.requests[place])]
        return replace(flight, result=self.engine.executor.sample(Masks(places, bits))), ended

    # -- reading

    def _read(self, flight: Flight) -> list[Request]:
        if flight.result.sampled is None:
            raise RuntimeError("a scheduled step was not sampled")
        sampled = flight.result.sampled()
        touched: list[Request] = []
        self._keep_logprobs(flight, sampled.logprobs, sampled.prompt_logprobs)
        self._keep_states(flight, sampled)
        self.kv.step_completed(flight.step.step_id)
        if flight.step.further is not None:
            return self._read_repeated(flight.requests, sampled.tokens.tolist())
        drawn = dict(zip(sampled.owner, sampled.tokens.tolist(), strict=True))
        for index, (request, row) in enumerate(zip(flight.requests, flight.step.rows, strict=True)):
            # Ended meanwhile: what the step computed for it is discarded.
            if request.status is Status.FINISHED:
                continue
            end = row.start + row.count
            self.kv.commit(request, end)
            if row.draw:
                request.pending -= 1
                self._take(request, drawn[index])
                touched.append(request)
            elif request.max_tokens == 0 and end == request.prompt_len:
                self._finish(request, self._end_of_prompt(request))
                touched.append(request)
        return touched

    def _read_repeated(self, requests: list[Request], drawn: list[int]) -> list[Request]:
        """Each request adds a token. Most of them do no more than that, which is written out: it is the host's work
        of a busy engine."""
        kv, touched = self.kv, []
        for request, token in zip(requests, drawn, strict=True):
            if request.status is Status.FINISHED:
                continue
            touched.append(request)
            tokens = request.tokens
            # Every token read so far has its KV: the last one got it in this step.
            count = len(tokens)
            if kv.windowed or not count % kv.block_size:
                kv.commit(request, count)
            else:
                request.num_committed = count
            request.pending -= 1
            if token < 0 or token in request.stop_ids or request.text is not None or request.guide is not None:
                self._take(request, token)
                continue
            tokens.append(token)
            self.generated_tokens += 1
            if count + 1 - request.prompt_len >= request.max_tokens:
                self._finish(request, "length")
        return touched

    @staticmethod
    def _end_of_prompt(request: Request) -> str:
        """Why a request ends that wants no token."""
        if not request.pooling:
            return "length"
        if np.isfinite(request.state).all():
            return "stop"
        request.error = "the hidden states are not finite, by the model's weights or this prompt"
        return "error"

    @staticmethod
    def _keep_states(flight: Flight, sampled: SampledRows) -> None:
        if sampled.pooled is None:
            return
        for index, state in zip(sampled.pooled_owner, sampled.pooled.numpy(), strict=True):
            request = flight.requests[index]
            # Preempted and computed anew: its sum begins again.
            begins = request.state is None or flight.step.rows[index].start == 0
            request.state = state.copy() if begins else request.state + state

    def _take(self, request: Request, token: int) -> None:
        if token < 0:
            request.error = (
                "no token can be drawn: the logits are not finite, by the model's weights, this prompt or its settings"
                if request.guide is None
                else "no token can be drawn: guide, logit_bias, bad_words and min_tokens together allow none, or the "
                "logits are not finite"
            )
            self._finish(request, "error")
            return
        request.tokens.append(token)
        self.generated_tokens += 1
        ends = token in request.stop_ids and request.num_generated > request.params.min_tokens
        # An end token's own text belongs to the answer only where the request says so.
        stop_text = request.push_text(token) if not ends or request.params.include_stop else None
        if request.guide is not None and not ends:
            request.guide.advance(token)
        if ends:
            request.stop_reason = token
            self._finish(request, "stop")
        elif stop_text is not None:
            request.stop_reason = stop_text
            self._finish(request, "stop")
        elif request.guide is not None and self._end_by_guide(request):
            return
        elif request.num_generated >= request.max_tokens:
            self._finish(request, "length")

    def _end_by_guide(self, request: Request) -> bool:
        """Ends a request whose guide is complete, or cannot go on; whether it did."""
        request.error = request.guide.error
        if request.error is not None:
            request.error = f"the guide cannot go on: {request.error}"
            self._finish(request, "error")
        elif request.guide.complete:
            self._finish(request, "stop")
        return request.is_finished

    def _finish(self, request: Request, reason: str) -> None:
        self.scheduler.finish(request, reason)

    def _keep_logprobs(self, flight: Flight, logprobs: RowLogprobs | None, prompt_logprobs: RowLogprobs | None) -> None:
        for index, position, entry in _logprob_entries(logprobs):
            request = flight.requests[index]
            if not request.is_finished and position == request.prompt_len + len(request.logprobs):
                request.logprobs.append(entry)
        for index, position, entry in _logprob_entries(prompt_logprobs):
            request = flight.requests[index]
            if not request.prompt_logprobs:
                request.prompt_logprobs.append(None)
            # Preempted and computed anew: what is known already comes again.
            if position == len(request.prompt_logprobs):
                request.prompt_logprobs.append(entry)


def sampler_of(request: Request) -> Sampler:
    """A request's sampling settings as the runner takes them."""
    params = request.params
    return Sampler(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=request.seed,
        prompt_len=request.prompt_len,
        bias=list(params.logit_bias.items()),
        bad_words=[list(word) for word in request.bad_words],
        min_tokens=params.min_tokens,
        end_ids=sorted(request.stop_ids),
        logprobs=-1 if params.logprobs is None else params.logprobs,
        prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        guided=request.guide is not None,
    )


def _logprob_entries(rows: RowLogprobs | None) -> Iterable[tuple[int, int, dict[int, float | None]]]:
    """(row, position, {token: log-probability}) of each line; the chosen token first."""
    if rows is None:
        return
    lines = zip(
        rows.owner,
        rows.positions,
        rows.counts,
        rows.chosen_ids.tolist(),
        rows.chosen.tolist(),
        rows.top_ids.tolist(),
        rows.top.tolist(),
        strict=True,
    )
    for owner, position, count, chosen_id, chosen, ids, values in lines:
        entry = {chosen_id: finite(chosen)}
        entry.update((token, finite(value)) for token, value in zip(ids[:count], values[:count], strict=True))
        yield owner, position, entry


def finite(value: float) -> float | None:
    """The value, or None where it is infinite or NaN: JSON knows neither."""
    return value if -1e300 < value < 1e300 else None
