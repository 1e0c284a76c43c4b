"""``phalanx bench serve``: load on a server, and what its clients see."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from phalanx.cli.failures import FAILED, Failure
from phalanx.cli.option_groups import grouped

if TYPE_CHECKING:
    from phalanx.bench.serving.figures import Objectives
    from phalanx.bench.serving.load import Load, Measured
    from phalanx.bench.serving.requests import Shape

INTERRUPTED = 130


def _option(*names: str, help: str, panel: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


@dataclass(frozen=True)
class TargetOptions:
    """Which server."""

    url: Annotated[str, _option("--url", panel="Server", help="Its address; routes are below its /v1.")] = (
        "http://127.0.0.1:8000"
    )
    model: Annotated[
        str | None, _option("--model", panel="Server", help="Its name there. [the first of /v1/models]")
    ] = None
    api_key: Annotated[
        str, _option("--api-key", panel="Server", envvar="OPENAI_API_KEY", help="Sent as a bearer token.")
    ] = ""
    endpoint: Annotated[str, _option("--endpoint", panel="Server", help="completions or chat.")] = "completions"


@dataclass(frozen=True)
class LoadOptions:
    """How requests are sent."""

    rate: Annotated[
        float | None, _option("--rate", panel="Load", help="Requests a second, whatever the answers do: an open loop.")
    ] = None
    burstiness: Annotated[
        float, _option("--burstiness", panel="Load", help="Of --rate: 1 is Poisson, below 1 in bursts, above 1 evener.")
    ] = 1.0
    concurrency: Annotated[
        int | None,
        _option("--concurrency", panel="Load", min=1, help="Requests always under way: a closed loop."),
    ] = None
    requests: Annotated[
        int | None, _option("--requests", panel="Load", min=1, help="How many. [100, or no limit with --duration]")
    ] = None
    duration: Annotated[
        float | None, _option("--duration", panel="Load", help="Seconds in which requests are sent.")
    ] = None
    warm_up: Annotated[
        int, _option("--warm-up", panel="Load", min=0, help="Requests that are answered first, not measured.")
    ] = 2
    timeout: Annotated[float, _option("--timeout", panel="Load", help="Seconds for a whole answer.")] = 600.0

    def load(self, seed: int) -> Load:
        """Raises BadParameter for what does not go together."""
        from phalanx.bench.serving.load import Load

        if (self.rate is None) == (self.concurrency is None):
            raise typer.BadParameter("give either --rate (an open loop) or --concurrency (a closed loop)")
        for name in ("rate", "burstiness", "duration", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise typer.BadParameter(f"--{name} {value}: a number above 0 is expected")
        if self.burstiness != 1 and self.rate is None:
            raise typer.BadParameter("--burstiness is of the times that --rate draws: give --rate")
        requests = self.requests or (None if self.duration else 100)
        return Load(
            self.rate, self.burstiness, self.concurrency or 1, requests, self.duration, self.warm_up, self.timeout, seed
        )


@dataclass(frozen=True)
class PromptOptions:
    """What is asked."""

    prompt_len: Annotated[
        str, _option("--prompt-len", panel="Requests", metavar="A:B", help="Tokens of a prompt, drawn uniformly.")
    ] = "16:512"
    output_len: Annotated[
        str, _option("--output-len", panel="Requests", metavar="A:B", help="Most tokens of an answer, drawn uniformly.")
    ] = "16:128"
    text: Annotated[
        bool,
        _option("--text", panel="Requests", help="Prompts of common words, about a token each, instead of token ids."),
    ] = False
    vocab_size: Annotated[
        int, _option("--vocab-size", panel="Requests", min=1, help="Token ids of prompts are drawn below it.")
    ] = 10_000
    shared_prefix_len: Annotated[
        int, _option("--shared-prefix-len", panel="Requests", min=0, help="Tokens of a beginning that prompts share.")
    ] = 0
    prefix_groups: Annotated[
        int, _option("--prefix-groups", panel="Requests", min=1, help="How many such beginnings there are.")
    ] = 1
    dataset: Annotated[
        Path | None,
        _option(
            "--dataset",
            panel="Requests",
            metavar="FILE",
            help="JSONL with prompt or messages, and max_tokens if known.",
        ),
    ] = None
    ignore_eos: Annotated[
        bool,
        _option("--ignore-eos", panel="Requests", help="Ask for full lengths (a field that not all servers know)."),
    ] = False
    extra: Annotated[
        str, _option("--extra", panel="Requests", metavar="JSON", help="Further fields of each request.")
    ] = "{}"
    seed: Annotated[int, _option("--seed", panel="Requests", help="Of prompts, lengths and times.")] = 0

    def bodies(self, shape: Shape) -> Any:
        """Requests without end. Raises BadParameter or ValueError for what does not go together."""
        from phalanx.bench.serving.requests import Synthetic, read_dataset
        from phalanx.bench.workload import parse_range

        if self.dataset is not None:
            if self.shared_prefix_len or self.text:
                raise typer.BadParameter("--dataset has its own prompts: leave --shared-prefix-len and --text out")
            return read_dataset(self.dataset, shape).requests(shape)
        vocab_size = None if self.text or shape.endpoint == "chat" else self.vocab_size
        prompts = Synthetic(parse_range(self.prompt_len), vocab_size, self.shared_prefix_len, self.prefix_groups)
        return prompts.requests(shape)

    def extra_fields(self) -> dict[str, Any]:
        """Raises BadParameter unless it is a JSON object."""
        try:
            found = json.loads(self.extra)
        except ValueError as error:
            raise typer.BadParameter(f"--extra is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise typer.BadParameter(f'--extra {self.extra}: a JSON object such as {{"temperature": 0}} is expected')
        return found


@dataclass(frozen=True)
class ReportOptions:
    """What is made of it."""

    slo: Annotated[
        str | None,
        _option("--slo", panel="Report", metavar="LIST", help="Objectives for goodput: ttft:200ms,tpot:50ms,e2e:2s."),
    ] = None
    json: Annotated[bool, _option("--json", panel="Report", help="JSON on standard output, errors too.")] = False
    save: Annotated[
        Path | None,
        _option("--save", panel="Report", metavar="FILE", help="Write the JSON, with every request, there."),
    ] = None
    picture: Annotated[
        Path | None, _option("--picture", panel="Report", metavar="FILE", help="Write an SVG of the run there.")
    ] = None
    debug: Annotated[bool, _option("--debug", panel="Report", help="Tracebacks of errors.")] = False

    def objectives(self) -> Objectives:
        from phalanx.bench.serving.figures import parse_objectives

        return {} if self.slo is None else parse_objectives(self.slo)


@grouped
def serve(*, target: TargetOptions, load: LoadOptions, prompts: PromptOptions, report: ReportOptions) -> None:
    """Load on a server with an OpenAI-compatible API, and what its clients see.

    Times are taken as events arrive, tokens are those that the server counts. TTFT is from sending to the first text,
    ITL between events with text, TPOT a token after the first, E2E to the end of the stream. Ctrl-C reports what there
    is.
    """
    from phalanx.bench.machine import command, machine
    from phalanx.bench.serving.figures import figures, per_request, warnings
    from phalanx.bench.serving.load import NothingAnswered
    from phalanx.bench.serving.load import run as run_load
    from phalanx.bench.serving.requests import ENDPOINTS, Shape
    from phalanx.bench.workload import parse_range

    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise Failure("phalanx bench serve needs aiohttp: pip install 'phalanx[bench]'") from None
    base = _base(target.url)
    if target.endpoint not in ENDPOINTS:
        raise typer.BadParameter(f"--endpoint {target.endpoint}: known are {', '.join(ENDPOINTS)}")
    objectives, plan = report.objectives(), load.load(prompts.seed)
    output_len, extra = parse_range(prompts.output_len), prompts.extra_fields()
    model = target.model or asyncio.run(_first_model(base, target.api_key))
    shape = Shape(model, target.endpoint, output_len, prompts.ignore_eos, extra, prompts.seed)
    bodies = prompts.bodies(shape)
    try:
        with _Progress(plan) as watch:
            measured = asyncio.run(run_load(base + ENDPOINTS[target.endpoint], target.api_key, bodies, plan, watch))
    except NothingAnswered as error:
        raise Failure(f"{base}: {error}") from error
    found = {
        "command": _without_key(command(), target.api_key),
        "machine": machine(),
        "url": target.url,
        "endpoint": target.endpoint,
        "model": model,
        "load": asdict(plan),
        **figures(measured, objectives),
    }
    found["warnings"] = warnings(found)
    if report.save is not None:
        _write(report.save, json.dumps({**found, "per_request": per_request(measured)}) + "\n")
    if report.picture is not None:
        _write(report.picture, _picture(measured, found))
    if report.json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print(found)
    if measured.stopped:
        raise typer.Exit(INTERRUPTED)
    if not found["requests"]["completed"]:
        raise typer.Exit(FAILED)


def _base(url: str) -> str:
    """The address without a path of /v1."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise typer.BadParameter(f"--url {url}: an address such as http://127.0.0.1:8000 is expected")
    return url.rstrip("/").removesuffix("/v1")


async def _first_model(base: str, key: str) -> str:
    import aiohttp

    from phalanx.bench.serving.load import open_session

    url = f"{base}/v1/models"
    try:
        async with open_session(key, 30) as session, session.get(url) as response:
            text = await response.text()
            if response.status != 200:
                hint = "; is --api-key right?" if response.status in (401, 403) else ""
                raise Failure(f"{url} answered HTTP {response.status}{hint}: {text[:300]}")
    except (aiohttp.ClientError, OSError) as error:
        raise Failure(f"{url} cannot be read; is the server running? {error or type(error).__name__}") from error
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise Failure(f"{url} names no model: give --model. It answered {text[:300]}") from None


def _without_key(line: str, key: str) -> str:
    """The command line, fit to be shown to others."""
    return line.replace(key, "KEY") if key else line


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class _Progress:
    """A bar on standard error, where that is a terminal. It is redrawn when it is told to only: a thread of its own
    would make the measurement late."""

    def __init__(self, plan: Load) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("warming up", total=plan.requests)

    def __enter__(self) -> Any:
        self._bar.start()
        return self._watch

    def __exit__(self, *error: Any) -> None:
        self._bar.stop()

    def _watch(self, measured: Measured) -> None:
        failed = sum(record.error is not None for record in measured.records) if self._shown else 0
        self._bar.update(
            self._task,
            completed=len(measured.records),
            description=f"{measured.under_way} under way" + (f", {failed} failed" if failed else ""),
            refresh=True,
        )

    @property
    def _shown(self) -> bool:
        return not self._bar.disable


def _loop_words(load: dict[str, Any]) -> str:
    if load["rate"] is None:
        return f"{load['concurrency']} requests always under way"
    kind = "" if load["burstiness"] == 1 else f" (burstiness {load['burstiness']:g})"
    return f"{load['rate']:g} requests a second{kind}"


def _tokens_words(found: dict[str, Any]) -> str:
    if found["output_tokens"] is None:
        return "tokens not counted"
    return f"{found['prompt_tokens'] or 0:,} tokens in, {found['output_tokens']:,} out"


def _picture(measured: Measured, found: dict[str, Any]) -> str:
    from phalanx.bench.serving.picture import svg

    rate = "" if found["output_tok_per_s"] is None else f", {found['output_tok_per_s']:,.1f} output tokens a second"
    told = f"{found['requests']['completed']} answers in {found['seconds']:.1f} s, {_tokens_words(found)}{rate}"
    return svg(measured, f"{found['model']}: {_loop_words(found['load'])}", told)


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    counts = found["requests"]
    console.print(f"{found['model']} at {found['url']}, {_loop_words(found['load'])}", markup=False)
    ended = "stopped after" if found["stopped"] else "in"
    told = [f"{counts['completed']} answers {ended} {found['seconds']:.1f} s", _tokens_words(found)]
    told += [f"{counts[name]} {name}" for name in ("failed", "interrupted") if counts[name]]
    console.print(", ".join(told), style="dim", markup=False)
    rates = Table("requests/s", "output tok/s", "total tok/s", box=None, header_style="dim")
    names = ["requests_per_s", "output_tok_per_s", "total_tok_per_s"]
    cells = ["" if found[name] is None else f"{found[name]:,.2f}" for name in names]
    if found["goodput"]:
        for name in ("good requests/s", "good"):
            rates.add_column(name)
        share = found["goodput"]["share"]
        cells += [f"{found['goodput']['requests_per_s']:,.2f}", "" if share is None else f"{share:.1%}"]
    rates.add_row(*cells)
    console.print(rates)
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    times = Table("ms", *columns, box=None, header_style="dim")
    for name in ("ttft", "itl", "tpot", "e2e"):
        values = found[f"{name}_ms"]
        if values:
            times.add_row(name.upper(), *(f"{values[column]:,.1f}" for column in columns))
    if times.rows:
        console.print(times)
    for error in found["errors"]:
        console.print(
            f"{error['count']} x {error['kind']}: {error['example']}", style="red", markup=False, soft_wrap=True
        )
    for warning in found["warnings"]:
        console.print(f"Warning: {warning}", style="yellow", markup=False, soft_wrap=True)
