"""Prompts as jobs: read from JSON lines, run in batches, written as records in the order of the input."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.engine import LLM, RequestOutput

Record = dict[str, Any]

SOURCES = ("prompt", "messages")


@dataclass(frozen=True)
class Job:
    """One prompt to answer.

    Attributes:
        line: its number in the input, from 1.
        prompt: a text, token ids, or the messages of a conversation.
        settings: fields of SamplingParams that are its own.
        id: the caller's name for it, handed back.
        error: why it cannot run; the rest means nothing then.
    """

    line: int
    prompt: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    id: Any = None
    error: str | None = None

    @property
    def is_conversation(self) -> bool:
        return isinstance(self.prompt, list) and bool(self.prompt) and isinstance(self.prompt[0], Mapping)


def read_jobs(lines: Iterable[str | bytes]) -> Iterator[Job]:
    """A job a line, empty lines skipped: ``{"prompt": text or ids}`` or ``{"messages": [...]}``, with an ``id`` and any
    field of SamplingParams. A line that is not one gives a job with an error."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            try:
                values = json.loads(line)
            except ValueError as error:
                raise ValueError(f"not JSON: {error}") from None
            if not isinstance(values, dict):
                raise ValueError(f"a line is a JSON object, this is a {type(values).__name__}")
            given = [name for name in SOURCES if values.get(name) is not None]
            if len(given) != 1:
                raise ValueError(f"give either 'prompt' or 'messages', {'both are' if given else 'neither is'} there")
            prompt = values[given[0]]
            if given == ["messages"] and not (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)):
                raise ValueError("'messages' is a list of objects with 'role' and 'content'")
            settings = {name: value for name, value in values.items() if name not in (*SOURCES, "id")}
            yield Job(number, prompt, settings, values.get("id"))
        except (ValueError, RecursionError) as error:
            yield Job(number, error=str(error))


def run_jobs(
    llm: LLM,
    jobs: Iterable[Job],
    defaults: Mapping[str, Any],
    templated: bool,
    emit: Callable[[Record], None],
) -> None:
    """Answers all jobs, as many at once as the engine takes, and emits their records in the order of the jobs.

    Args:
        defaults: sampling settings; a job's own win.
        templated: put plain texts into the model's chat template.
        emit: gets each record as soon as those before it are done.
    """
    waiting = iter(jobs)
    running: dict[str, tuple[int, Job]] = {}
    ready: dict[int, Record] = {}
    started = emitted = 0
    exhausted = False
    while running or not exhausted:
        # Twice what a step takes: there is always a next one, and a long input is not all in memory.
        while not exhausted and len(running) < 2 * llm.engine.max_num_seqs:
            job = next(waiting, None)
            if job is None:
                exhausted = True
                break
            try:
                running[_start(llm, job, defaults, templated)] = started, job
            except ValueError as error:
                ready[started] = error_record(job, str(error))
            started += 1
        if running:
            for group in llm.step():
                if group.finished:
                    place, job = running.pop(group.request_id)
                    ready[place] = record(job, group.output())
        while emitted in ready:
            emit(ready.pop(emitted))
            emitted += 1


def _start(llm: LLM, job: Job, defaults: Mapping[str, Any], templated: bool) -> str:
    if job.error is not None:
        raise ValueError(job.error)
    prompt = job.prompt
    if job.is_conversation:
        prompt = llm.prompt_of(prompt)
    elif templated and isinstance(prompt, str):
        prompt = llm.prompt_of([{"role": "user", "content": prompt}])
    return llm.add_request(prompt, {**defaults, **job.settings})


def record(job: Job, output: RequestOutput) -> Record:
    """What is known of a job that has run; ``text`` is the first answer's."""
    import msgspec

    found = msgspec.to_builtins(output, str_keys=True)
    outputs = [{name: value for name, value in one.items() if value is not None} for one in found["outputs"]]
    result = {
        **_head(job),
        "prompt": job.prompt,
        "text": output.text,
        "outputs": outputs,
        "prompt_token_ids": output.prompt_token_ids,
        "cached_tokens": output.cached_tokens,
    }
    if found["prompt_logprobs"] is not None:
        result["prompt_logprobs"] = found["prompt_logprobs"]
    failed = next((one["error"] for one in outputs if "error" in one), None)
    return result if failed is None else {**result, "error": {"type": "RequestError", "message": failed}}


def error_record(job: Job, message: str) -> Record:
    """The record of a job that could not run."""
    return {**_head(job), "error": {"type": "ValueError", "message": message}}


def _head(job: Job) -> Record:
    return {"line": job.line} if job.id is None else {"line": job.line, "id": job.id}
