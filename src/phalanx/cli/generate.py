"""``phalanx generate``: answers to prompts, as they come or in batches."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.failures import BAD_INPUT, FAILED
from phalanx.cli.jobs import Job, Record, read_jobs, run_jobs
from phalanx.cli.option_groups import grouped
from phalanx.cli.options import EngineOptions, OutputOptions, SamplingOptions, check_sampling
from phalanx.cli.running import check_name, has_template, load, notes

if TYPE_CHECKING:
    from phalanx.engine import LLM


@grouped
def generate(
    model: Annotated[str, typer.Argument(help="What answers.")],
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="What to answer.")] = None,
    input: Annotated[
        str | None,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            help='JSON lines, "-" for standard input: {"prompt": text or ids} or {"messages": [...]}, an "id" if you '
            "like, and any sampling setting by its name in SamplingParams.",
        ),
    ] = None,
    output_file: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help='Write a JSON record a prompt, "-" for standard output.'),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put plain prompts into the model's chat template, or give them to the model as they are. "
            "Default: the template, where the model has one.",
            show_default=False,
        ),
    ] = None,
    *,
    sampling: SamplingOptions,
    engine: EngineOptions,
    output: OutputOptions,
) -> None:
    """Answer prompts. One prompt is printed as it comes, many run in batches.

    With --json, --input or --output each prompt gives a JSON record on a line of its own, in the order of the input. A
    line that cannot run gives a record with an "error"; the others run, and the exit code is 2.
    """
    jobs = _jobs(prompts or [], input)
    check_name(model)
    defaults = sampling.settings()
    as_records = output.json or input is not None or output_file is not None
    if not as_records and ("logprobs" in defaults or "prompt_logprobs" in defaults):
        raise typer.BadParameter("log-probabilities are part of the JSON record: add --json")
    if input is None:
        check_sampling(defaults)
    writer = _writer(output_file)
    with load(model, engine, output) as llm:
        templated = has_template(llm) if chat is None else chat
        if as_records:
            with writer as write:
                code = _run_records(llm, jobs, defaults, templated, write)
        elif len(jobs) == 1 and defaults.get("n", 1) == 1:
            code = _stream(llm, jobs[0].prompt, defaults, templated)
        else:
            code = _run_texts(llm, jobs, defaults, templated)
    raise typer.Exit(code)


def _jobs(prompts: list[str], input: str | None) -> list[Job]:
    if (input is None) == (not prompts):
        raise typer.BadParameter("give prompts or --input, and not both")
    if input is None:
        return [Job(number, prompt) for number, prompt in enumerate(prompts, start=1)]
    if input == "-" and sys.stdin is None:
        raise typer.BadParameter("--input - reads standard input, which is closed")
    data = sys.stdin.buffer.read() if input == "-" else Path(input).read_bytes()
    # Not splitlines(), which also ends lines at characters that JSON texts may contain.
    return list(read_jobs(data.removeprefix(codecs.BOM_UTF8).split(b"\n")))


def _stream(llm: LLM, prompt: str, defaults: dict[str, Any], templated: bool) -> int:
    given: Any = [{"role": "user", "content": prompt}] if templated else prompt
    error = None
    for chunk in llm.stream(given, defaults):
        typer.echo(chunk.text, nl=False)
        sys.stdout.flush()
        error = chunk.error
    typer.echo()
    if error is not None:
        notes().print(error, style="red", markup=False)
    return 0 if error is None else FAILED


def _run_texts(llm: LLM, jobs: list[Job], defaults: dict[str, Any], templated: bool) -> int:
    """Many prompts for people: each with its answers."""

    def write(found: Record) -> None:
        typer.echo(f"[{found['line']}] {jobs[found['line'] - 1].prompt}")
        if "error" in found:
            notes().print(found["error"]["message"], style="red", markup=False)
        for answer in found.get("outputs", ()):
            typer.echo(answer["text"])
        typer.echo()

    return _run_records(llm, jobs, defaults, templated, write)


def _run_records(
    llm: LLM, jobs: list[Job], defaults: dict[str, Any], templated: bool, write: Callable[[Record], None]
) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    refused, failed = 0, 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = notes()
    with Progress(*columns, console=console, disable=len(jobs) == 1 or not console.is_terminal) as progress:
        task = progress.add_task("prompts", total=len(jobs))

        def emit(found: Record) -> None:
            nonlocal refused, failed
            if "error" in found:
                refused += "outputs" not in found
                failed += "outputs" in found
            write(found)
            progress.advance(task)

        run_jobs(llm, jobs, defaults, templated, emit)
    if refused or failed:
        console.print(f"{refused + failed} of {len(jobs)} prompts have an error", style="red")
    return BAD_INPUT if refused else FAILED if failed else 0


def _writer(path: str | None) -> AbstractContextManager[Callable[[Record], None]]:
    """Writes records as JSON lines: to standard output; into what is no regular file (a pipe, a device) as it comes; to
    a file, or what a link points to, aside and then renamed, so that it is there whole or not at all. What a run had
    written that failed stays as ``FILE.partial``.

    Raises:
        typer.BadParameter: at once, where nothing can be written there.
    """
    if path is None or path == "-":
        return nullcontext(lambda found: typer.echo(json.dumps(found)))
    target = Path(path).resolve()
    if target.is_dir() or not target.parent.is_dir():
        raise typer.BadParameter(
            f"--output {path}: {'it is a folder' if target.is_dir() else 'there is no such folder'}"
        )
    if target.exists() and not target.is_file():
        return _write_into(target)
    return _write_aside(target)


@contextmanager
def _write_into(target: Path) -> Iterator[Callable[[Record], None]]:
    with target.open("w", encoding="utf-8") as file:
        yield lambda found: print(json.dumps(found), file=file, flush=True)


@contextmanager
def _write_aside(target: Path) -> Iterator[Callable[[Record], None]]:
    aside = target.with_name(f"{target.name}.partial")
    with aside.open("w", encoding="utf-8") as file:
        yield lambda found: print(json.dumps(found), file=file)
    aside.replace(target)
