"""``phalanx bench``: throughput and latency, alone or beside other engines."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.bench import PEERS
from phalanx.cli.bench_serve import serve
from phalanx.cli.option_groups import grouped
from phalanx.cli.options import EngineOptions, OutputOptions

if TYPE_CHECKING:
    from phalanx.bench.comparison import Opener
    from phalanx.bench.workload import Plan
    from phalanx.engine import LLM

bench = typer.Typer(no_args_is_help=True, help="Measure speed, alone or beside other engines on the same weights.")
bench.command()(serve)


@dataclass(frozen=True)
class WorkloadOptions:
    """What is measured, against whom."""

    requests: Annotated[int, typer.Option("--requests", min=1, help="Prompts.")] = 32
    prompt_len: Annotated[
        str, typer.Option("--prompt-len", metavar="A:B", help="Tokens of a prompt, drawn uniformly.")
    ] = "16:512"
    output_len: Annotated[
        str, typer.Option("--output-len", metavar="A:B", help="Tokens of an answer, drawn uniformly.")
    ] = "16:128"
    seed: Annotated[int, typer.Option("--seed", help="Of the prompts.")] = 0
    warm_up: Annotated[int, typer.Option("--warm-up", min=1, help="Prompts that are run first, not measured.")] = 2
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Measurements; medians are reported.")] = 1
    peer: Annotated[
        list[str],
        typer.Option("--peer", metavar="NAME", help="transformers or vllm: measured too, each alone. Repeatable."),
    ] = field(default_factory=list)
    peer_mode: Annotated[
        list[str],
        typer.Option(
            "--peer-mode",
            metavar="MODE",
            help="Only these modes of the peers. transformers: padded, continuous, single. vllm: compiled, eager.",
        ),
    ] = field(default_factory=list)
    peer_python: Annotated[
        Path | None, typer.Option("--peer-python", metavar="PATH", help="The Python interpreter that has vllm.")
    ] = None
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the JSON there, whatever is printed.")
    ] = None

    def check(self, engine: EngineOptions) -> None:
        """Raises BadParameter for what does not go together, before anything is loaded."""
        for name in self.peer:
            if name not in PEERS:
                raise typer.BadParameter(f"--peer {name}: known are {', '.join(PEERS)}")
        if "vllm" in self.peer and (self.peer_python is None or not self.peer_python.is_file()):
            raise typer.BadParameter("--peer vllm needs --peer-python, the interpreter of an environment that has vllm")
        if "transformers" in self.peer and (engine.tp or 1) > 1:
            raise typer.BadParameter("--peer transformers is measured on one rank: leave --tp out")
        known = [mode for name in self.peer for mode in PEERS[name]]
        for mode in self.peer_mode:
            if mode not in known:
                raise typer.BadParameter(
                    f"--peer-mode {mode}: the peers' modes are {', '.join(known) or 'none: no --peer'}"
                )

    def modes(self, peer: str, kind: str) -> list[str]:
        """The modes of a peer to measure."""
        # One prompt at a time there is nothing to batch.
        able = ("single",) if (peer, kind) == ("transformers", "latency") else PEERS[peer]
        return [mode for mode in able if not self.peer_mode or mode in self.peer_mode]


@bench.command()
@grouped
def throughput(
    model: Annotated[str, typer.Argument(help="What to measure.")],
    *,
    workload: WorkloadOptions,
    engine: EngineOptions,
    output: OutputOptions,
) -> None:
    """Tokens a second with all prompts given at once.

    Prompts are random tokens, answers greedy, end tokens ignored, the prefix cache off. Every engine is measured alone,
    after a warm-up, on the same weights and prompts; the answers of the others are compared with ours.
    """
    _run("throughput", model, workload, engine, output)


@bench.command()
@grouped
def latency(
    model: Annotated[str, typer.Argument(help="What to measure.")],
    *,
    workload: WorkloadOptions,
    engine: EngineOptions,
    output: OutputOptions,
) -> None:
    """Time to the first token and between tokens, one prompt at a time.

    Prompts are random tokens, answers greedy, end tokens ignored, the prefix cache off.
    """
    _run("latency", model, workload, engine, output)


def _run(kind: str, model: str, options: WorkloadOptions, engine: EngineOptions, output: OutputOptions) -> None:
    from phalanx.bench.workload import parse_range

    options.check(engine)
    lengths = parse_range(options.prompt_len), parse_range(options.output_len)
    found = measure(kind, model, options, engine, output, *lengths)
    text = json.dumps(found, indent=2)
    if options.save is not None:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(text + "\n")
    if output.json:
        typer.echo(text)
    else:
        _print(found)


def measure(
    kind: str,
    model: str,
    options: WorkloadOptions,
    engine: EngineOptions,
    output: OutputOptions,
    prompt_len: range,
    output_len: range,
) -> dict[str, Any]:
    """The measurement as it is saved."""
    from phalanx.bench.comparison import compare
    from phalanx.bench.machine import command, machine
    from phalanx.bench.ours import Phalanx
    from phalanx.bench.workload import Plan, draw
    from phalanx.cli.running import load, notes

    longest = prompt_len[-1] + output_len[-1]
    llm = load(model, engine, output, max_model_len=longest, prefix_cache=False)
    vocab = llm.engine.model.vocab_size
    plan = Plan(
        kind,
        draw(options.warm_up, prompt_len, output_len, vocab, options.seed + 1),
        draw(options.requests, prompt_len, output_len, vocab, options.seed),
        options.repeat,
    )
    where, console = machine(), notes()
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as scratch:
        peers = list(_peers(model, options, engine, llm, plan, Path(scratch)))
        found = compare(plan, lambda: Phalanx(llm), peers, lambda line: console.print(line, markup=False))
    return {
        "command": command(),
        "machine": where,
        "kind": kind,
        "model": model,
        "dtype": str(llm.engine.model.dtype).removeprefix("torch."),
        "workload": {
            "requests": options.requests,
            "prompt_tokens": plan.workload.prompt_tokens,
            "output_tokens": plan.workload.output_tokens,
            "prompt_len": options.prompt_len,
            "output_len": options.output_len,
            "seed": options.seed,
        },
        **found,
    }


def _peers(
    model: str, options: WorkloadOptions, engine: EngineOptions, llm: LLM, plan: Plan, scratch: Path
) -> Iterator[tuple[str, str, Opener]]:
    """Every mode of every peer that was asked for; nothing of it is loaded before its turn."""
    if not options.peer:
        return
    from phalanx.bench import transformers_peer, vllm_peer
    from phalanx.bench.hf_copy import hf_folder

    dtype, device = llm.engine.model.dtype, llm.engine.model.device
    folder = hf_folder(model, dtype, engine.load_format == "dummy", scratch / "model")
    for name in options.peer:
        for mode in options.modes(name, plan.kind):
            opener: Any = partial(transformers_peer.Transformers, folder, mode, dtype, device, engine.threads)
            if name == "vllm" and options.peer_python is not None:
                settings = {
                    "dtype": str(dtype).removeprefix("torch."),
                    "max_model_len": plan.workload.longest + 1,
                    "tensor_parallel_size": engine.tp or 1,
                    # Its default refuses to start where a little of the CPU's memory is in use.
                    "gpu_memory_utilization": engine.memory_fraction or (0.5 if device.type == "cpu" else 0.9),
                }
                opener = partial(vllm_peer.VLLM, options.peer_python, folder, mode, scratch, settings, engine.threads)
            yield name, mode, opener


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    work, where = found["workload"], found["machine"]
    console.print(
        f"{found['kind']} of {found['model']} in {found['dtype']}: {work['requests']} prompts, "
        f"{work['prompt_tokens']:,} tokens in, {work['output_tokens']:,} out",
        markup=False,
    )
    device = where["gpu"] or f"{where['cpu']}, {where['threads']} of {where['cores']} cores"
    console.print(f"{device}, torch {where['torch']}, load {where['load_average'][0]}", style="dim", markup=False)
    names = ["engine", "mode", "output tok/s", "per core-second", "total tok/s"]
    if found["kind"] == "latency":
        names += ["first token p50, p99 ms", "between tokens p50, p99 ms"]
    table = Table(*names, "same answers", box=None, header_style="dim")
    for result in found["results"]:
        table.add_row(*_cells(result, found["kind"], work["requests"]))
    console.print(table)
    if found["ratio"]:
        ratios = ", ".join(f"{value} ({name})" for name, value in found["ratio"].items())
        console.print(f"times as fast as {found['best_peer']}: {ratios}", markup=False)


def _cells(result: dict[str, Any], kind: str, requests: int) -> list[str]:
    head = [result["engine"], result["mode"]]
    if "error" in result:
        return [*head, f"[red]{result['error'][:60]}[/red]"]
    cells = [
        *head,
        str(result["output_tok_per_s"]),
        str(result["output_tok_per_core_s"] or ""),
        str(result["total_tok_per_s"]),
    ]
    if kind == "latency":
        cells += ["{p50}, {p99}".format(**result[name]) for name in ("first_token_ms", "inter_token_ms")]
    same = result.get("identical_answers")
    return [*cells, "" if same is None else f"{same} of {requests}"]
