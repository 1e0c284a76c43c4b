"""``phalanx info``: what a model is and what it takes, read from headers."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.option_groups import grouped
from phalanx.cli.options import EngineOptions, OutputOptions

if TYPE_CHECKING:
    from phalanx.config import EngineConfig
    from phalanx.engine.opened_model import OpenedModel
    from phalanx.models import TransformerModel
    from phalanx.weights import WeightSource


@grouped
def info(
    model: Annotated[str, typer.Argument(help="What to look at; a folder with a config.json alone will do.")],
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", min=1, help="Say what a sequence of this many takes. \\[the context]", show_default=False
        ),
    ] = None,
    *,
    engine: EngineOptions,
    output: OutputOptions,
) -> None:
    """Say what a model is and what it takes on each rank. Reads headers, no weights, and needs no GPU."""
    from phalanx.cli.running import fetched, notes, sayer, set_logging

    set_logging(output)
    console = notes()
    with console.status(f"reading {model}") as status:
        found = describe(fetched(model, sayer(console, status)), engine, tokens)
    if output.json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print(found)


def describe(model: str, engine: EngineOptions, tokens: int | None = None) -> dict[str, Any]:
    """All that ``info`` knows, as JSON has it.

    A model that is not served, or weights that cannot be, are told under ``problems`` beside what is known.
    """
    from phalanx.config import engine_config
    from phalanx.engine.opened_model import OpenedModel, load_policies
    from phalanx.models import ModelConfigError

    settings = engine_config(engine.settings())
    load_policies(settings)
    opened = OpenedModel(model)
    source, weights, problems = _weights(opened)
    dtype = opened.manifest["dtype"] if opened.manifest is not None else opened.config.dtype
    found: dict[str, Any] = {
        "model": model,
        "path": opened.spec(),
        "model_type": opened.config["model_type"],
        "weights": weights,
        "problems": problems,
        "checkpoint_dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "eos_token_ids": sorted(opened.eos_token_ids()),
        "has_tokenizer": opened.tokenizer() is not None,
        "has_chat_template": bool(getattr(opened.tokenizer(), "chat_template", None)),
    }
    if source is None:
        return found
    try:
        return {**found, **_served(opened, source, settings, tokens)}
    except ModelConfigError as error:
        problems.append(str(error))
        return found


def _weights(opened: OpenedModel) -> tuple[WeightSource | None, str, list[str]]:
    """Where shapes are read, what kind of weights there are, and what is wrong with them."""
    from phalanx.models.policy import policy_for
    from phalanx.weights import WeightError, open_source
    from phalanx.weights.dummy import DummySource

    problems: list[str] = []
    kind = "absent"
    if opened.manifest is not None:
        kind = "serialised"
    else:
        try:
            source = opened.source or open_source(opened.path)
            kind = type(source).__name__.removesuffix("Source").lower()
            problems += source.verify()
            if not problems:
                return source, kind, problems
        except WeightError as error:
            problems += error.problems
    try:
        # The config says what shapes there should be.
        policy_for(opened.config)
        return DummySource(dict(opened.config.given)), kind, problems
    except (ValueError, KeyError) as error:
        return None, kind, [*problems, str(error)]


def _served(opened: OpenedModel, source: WeightSource, settings: EngineConfig, tokens: int | None) -> dict[str, Any]:
    from phalanx.distributed.absent import AbsentRank
    from phalanx.engine.footprint import blocks_of, hollow_model, rank_footprint
    from phalanx.models.policy import policy_for

    if opened.manifest is not None and settings.dtype == "auto":
        settings = settings.model_copy(update={"dtype": opened.manifest["dtype"]})
    world = settings.tensor_parallel_size
    whole = hollow_model(opened.config, source, settings, AbsentRank(0, 1))
    models = [hollow_model(opened.config, source, settings, AbsentRank(rank, world)) for rank in range(world)]
    ranks = [rank_footprint(model) for model in models]
    context = settings.max_model_len or whole.max_sequence_length
    wanted = tokens or context
    memory = [
        {"kv_bytes": blocks_of(model, wanted) * rank.kv_block_bytes, "parameter_bytes": rank.parameter_bytes}
        for model, rank in zip(models, ranks, strict=True)
    ]
    total = rank_footprint(whole)
    return {
        "policy": policy_for(opened.config).__name__,
        **_traits(whole),
        "dtype": str(whole.dtype).removeprefix("torch."),
        "context": context,
        "parameters": total.parameters,
        "parameter_bytes": total.parameter_bytes,
        "kv_bytes_per_token": total.kv_bytes_per_token,
        "block_size": settings.block_size,
        "kv_block_bytes": total.kv_block_bytes,
        "tensor_parallel_size": world,
        "ranks": [asdict(rank) for rank in ranks],
        "memory": {"tokens": wanted, "ranks": memory},
    }


def _traits(model: TransformerModel) -> dict[str, Any]:
    windows = {model.window(layer) for layer in range(model.num_layers)} - {None}
    rope = None if model.rope is None else replace(model.rope, parameters=dict(model.rope.parameters))
    return {
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "tied_head": model.tied_head,
        "windows": sorted(window for window in windows if window is not None),
        "windowed_layers": sum(model.window(layer) is not None for layer in range(model.num_layers)),
        "rope": None if rope is None else asdict(rope),
    }


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    for name, value in _lines(found):
        table.add_row(f"[dim]{name}[/dim]", value)
    console.print(table)
    if "ranks" in found:
        console.print(_rank_table(found))
    for problem in found["problems"]:
        console.print(f"problem: {problem}", style="red", markup=False)


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [
        ("model", found["model"]),
        ("path", found["path"] or "in memory"),
        ("type", f"{found['model_type']}, served by {found.get('policy') or 'nothing here'}"),
        ("weights", f"{found['weights']}, {found['checkpoint_dtype'] or 'dtype not named'}"),
        ("end tokens", ", ".join(map(str, found["eos_token_ids"])) or "none"),
        ("chat template", "yes" if found["has_chat_template"] else "no"),
    ]
    if "layers" not in found:
        return lines
    rope = found["rope"]
    windows = f", {found['windowed_layers']} layers see {found['windows']} tokens" if found["windows"] else ""
    return [
        *lines,
        ("layers", f"{found['layers']} of hidden size {found['hidden_size']}, MLP {found['intermediate_size']}"),
        ("heads", f"{found['heads']} query, {found['kv_heads']} KV, of {found['head_dim']}{windows}"),
        ("vocabulary", f"{found['vocab_size']:,}{', head tied to the embedding' if found['tied_head'] else ''}"),
        ("context", f"{found['context']:,} tokens"),
        ("rope", "none" if rope is None else f"{rope['kind']}, theta {rope['theta']:g}, {rope['rotary_dim']} wide"),
        ("parameters", f"{found['parameters']:,}: {_bytes(found['parameter_bytes'])} in {found['dtype']}"),
        (
            "KV cache",
            f"{_bytes(found['kv_bytes_per_token'])} a token, {_bytes(found['kv_block_bytes'])} a block"
            f" of {found['block_size']} tokens",
        ),
    ]


def _rank_table(found: dict[str, Any]) -> Any:
    from rich.table import Table

    tokens = found["memory"]["tokens"]
    names = ("rank", "heads", "KV heads", "parameters", "weights", "KV a token", f"KV of {tokens:,}", "sum")
    table = Table(box=None, header_style="dim")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for rank, memory in zip(found["ranks"], found["memory"]["ranks"], strict=True):
        table.add_row(
            str(rank["rank"]),
            str(rank["query_heads"]),
            str(rank["kv_heads"]),
            f"{rank['parameters'] / 1e6:,.1f} M",
            _bytes(rank["parameter_bytes"]),
            _bytes(rank["kv_bytes_per_token"]),
            _bytes(memory["kv_bytes"]),
            _bytes(memory["kv_bytes"] + memory["parameter_bytes"]),
        )
    return table


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.2f} GiB"
