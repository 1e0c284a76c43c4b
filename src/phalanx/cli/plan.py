"""``phalanx plan``: how a model would be cut for training, and what each rank would hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from phalanx.cli.option_groups import grouped
from phalanx.cli.options import OutputOptions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from phalanx.parallel.plan import GroupPlan
    from phalanx.training.plan import RankMemory, TrainingPlan

# Where the output is no terminal, lines are as long as they need be.
_UNBOUND = 400
_MEMORY = {
    "weights": "weights",
    "gradients": "gradients",
    "in_flight": "in flight",
    "masters": "fp32 masters",
    "moments": "optimizer",
    "total": "sum",
}


@grouped
def plan(
    model: Annotated[str, typer.Argument(help="What to plan for; a config.json, or a folder with one, will do.")],
    tp: Annotated[
        int | None, typer.Option("--tp", min=1, help="Ranks that the model is cut over. \\[the config's, or 1]")
    ] = None,
    dp: Annotated[
        int | None, typer.Option("--dp", min=1, help="Copies of it, each with its own data. \\[the config's, or 1]")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="A DeepSpeed config: rules, ZeRO stage, dtype.")
    ] = None,
    zero: Annotated[int | None, typer.Option("--zero", min=0, max=3, help="ZeRO stage. \\[the config's, or 0]")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="bf16, fp16 or fp32. \\[the config's, or bf16]")] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.svg", help="Draw what each rank holds.")
    ] = None,
    verify: Annotated[
        str | None,
        typer.Option(
            "--verify",
            help="error, warn or off: try the rules on a small model. \\[the config's, or error for rules of yours]",
        ),
    ] = None,
    *,
    output: OutputOptions,
) -> None:
    """Say how a model would be cut for training, and what each rank would hold. Needs neither its weights nor a GPU.

    For each parameter: its cut, its bytes on a rank, what is copied and why, the rule that decided. The rules are tried
    on a small random model of the same architecture, as they are before a training run.
    """
    from phalanx.cli.running import notes, sayer, set_logging

    if picture is not None and picture.suffix != ".svg":
        raise typer.BadParameter(f"--picture {picture}: pictures are SVG, so its name must end in .svg")
    action = _action(verify)
    set_logging(output)
    console = notes()
    with console.status(f"planning {model}") as status:
        from phalanx.parallel.plan import hollow_model
        from phalanx.training.plan import plan_settings, plan_training

        settings = plan_settings(config, tp_size=tp, dp_size=dp, stage=zero, dtype=_dtype(dtype))
        found = plan_training(hollow_model(model_config(model, sayer(console, status))), settings, verify=action)
    if picture is not None:
        from phalanx.training.picture import svg

        picture.write_text(svg(found, _title(model)), encoding="utf-8")
    if output.json:
        typer.echo(json.dumps({"model": model, **described(found)}, indent=2))
    else:
        from rich.console import Console

        console = Console(highlight=False)
        _print(console if console.is_terminal else Console(highlight=False, width=_UNBOUND), model, found)


def model_config(model: str, say: Any) -> Any:
    """The transformers config of a model; nothing but the config is fetched.

    Raises:
        ValueError: nothing that has one, or one that transformers does not know.
    """
    from transformers import AutoConfig

    from phalanx.models import ModelConfigError
    from phalanx.weights.names import is_hub_id

    path = Path(model).expanduser()
    has_config = (path.is_file() and path.suffix == ".json") or (path / "config.json").is_file()
    on_hub = not path.exists() and "/" in model and is_hub_id(model)
    if not (has_config or on_hub):
        from phalanx.cli.running import fetched
        from phalanx.engine.opened_model import OpenedModel

        values = OpenedModel(fetched(model, say)).config.given
        return AutoConfig.for_model(**values)
    try:
        return AutoConfig.from_pretrained(path if has_config else model, trust_remote_code=False)
    except OSError as error:
        raise ModelConfigError(
            f"{model!r} is no local path, and its config could not be had from the Hugging Face hub: {error}"
            if on_hub
            else f"the config of {model!r} cannot be read: {error}"
        ) from error


def described(found: TrainingPlan) -> dict[str, Any]:
    """A plan as JSON has it; sizes in bytes."""
    width = found.dtype.itemsize
    ranks = range(found.model.tp_size)
    return {
        "model_type": found.model.model_type,
        "tensor_parallel_size": found.model.tp_size,
        "data_parallel_size": found.dp_size,
        "zero_stage": found.stage,
        "dtype": str(found.dtype).removeprefix("torch."),
        "optimizer": found.optimizer,
        "optimizer_assumed": found.assumed,
        "gradient_accumulation_steps": found.accumulation_steps,
        "parameters": found.model.parameters,
        "copied_parameters": found.model.copied,
        "copied_share": found.model.copied_share,
        "verification": None if found.verdict is None else asdict(found.verdict),
        "ranks": [{**asdict(memory), "total": memory.total} for memory in found.memory],
        "groups": [
            {
                "name": group.name,
                "also": group.also,
                "count": group.count,
                "shape": group.shape,
                "part": group.part,
                "style": group.style,
                "partition": group.partition.to_json(),
                "local_shapes": group.local_shapes,
                "weight_bytes": [group.held(rank) * width for rank in ranks],
                "held_elsewhere_too_bytes": [group.held_elsewhere_too(rank) * width for rank in ranks],
                "why_copied": group.why_copied,
                "gradient_is_summed": group.partial,
                "rule": group.source,
                "hand_written": group.hand_written,
            }
            for group in found.model.groups
        ],
    }


def _action(verify: str | None) -> Literal["error", "warn", "off"] | None:
    for action in ("error", "warn", "off"):
        if verify == action:
            return action
    if verify is not None:
        raise typer.BadParameter(f"--verify {verify}: expected error, warn or off")
    return None


def _dtype(name: str | None) -> str | None:
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name or "", name)


def _title(model: str) -> str:
    path = Path(model)
    return path.parent.name if path.name == "config.json" and path.parent.name else path.name


def _print(console: Console, model: str, found: TrainingPlan) -> None:
    optimizer = f"{found.optimizer}{' (assumed)' if found.assumed else ''}"
    steps = f", {found.accumulation_steps} passes a step" if found.accumulation_steps > 1 else ""
    tp_size = found.model.tp_size
    console.print(
        f"{_title(model)} ({found.model.model_type}): {found.model.parameters:,} parameters over "
        f"{tp_size} tensor-parallel x {found.dp_size} data-parallel ranks",
        style="bold",
        markup=False,
    )
    console.print(
        f"ZeRO {found.stage}, {str(found.dtype).removeprefix('torch.')}, {optimizer}{steps}\n",
        style="dim",
        markup=False,
    )
    for make in (_parameter_table, _memory_table):
        table = make(found)
        if console.measure(table, options=console.options.update(width=_UNBOUND)).maximum > console.width:
            table = make(found, narrow=True)
        console.print(table, "")
    console.print(
        "in flight: gradients on their way to other ranks. Activations and what the allocator keeps are not counted.",
        style="dim",
    )
    if tp_size > 1:
        from phalanx.training.picture import percent

        share = percent(found.model.copied_share)
        console.print(f"{share} of what the ranks hold are copies ({found.model.copied:,} parameters).")
        _print_verdict(console, found)


def _print_verdict(console: Console, found: TrainingPlan) -> None:
    verdict = found.verdict
    if verdict is None:
        console.print("The rules were not tried.", style="yellow")
    elif verdict.fault:
        console.print(f"Not proven: {verdict.fault}", style="red" if verdict.tried else "yellow", markup=False)
    else:
        console.print(
            "Proven: a small model of this architecture, cut by these rules, gives the outputs and gradients of the "
            "whole one.",
            style="green",
        )


def _parameter_table(found: TrainingPlan, narrow: bool = False) -> Table:
    """One line a group, those of one place in the model under its name. `narrow`: the rule stands below the name."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="dim", padding=(0, 1), pad_edge=False)
    for name in ("parameter", "whole", "cut", "on a rank", "a rank holds", *(() if narrow else ("rule (why copied)",))):
        right = name in ("whole", "on a rank", "a rank holds")
        table.add_column(name, justify="right" if right else "left", no_wrap=not narrow, overflow="fold")
    width = found.dtype.itemsize
    for place, groups in groupby(found.model.groups, key=lambda group: _place(group.name)):
        if place:
            table.add_row(f"[bold]{escape(place)}[/bold]")
        for group in groups:
            bytes_held = [group.held(rank) * width for rank in range(found.model.tp_size)]
            cells = [
                ("  " if place else "") + "\n".join([group.name[len(place) :].lstrip("."), *group.also]),
                _shape(group.shape),
                _cut(group),
                _shapes(group),
                _size_range(bytes_held),
            ]
            cells = [escape(cell) for cell in cells]
            if narrow:
                cells[0] += f"\n[dim]{escape(_rule(group))}[/dim]"
            else:
                cells.append(escape(_rule(group)))
            table.add_row(*cells)
    return table


def _place(name: str) -> str:
    """The numbered module that a group of parameters belongs to: `model.layers.{0..79}`."""
    return name[: name.rindex("}") + 1] if "}" in name else ""


def _cut(group: GroupPlan) -> str:
    return f"experts, {group.partition.kind}" if group.style == "experts" else group.style


def _rule(group: GroupPlan) -> str:
    rule = f"{group.source}; gradients are summed" if group.partial else group.source
    return f"{rule} ({group.why_copied})" if group.why_copied else rule


def _shape(sizes: Iterable[int]) -> str:
    return " x ".join(map(str, sizes))


def _shapes(group: GroupPlan) -> str:
    """What ranks hold of one parameter, told once where it is the same."""
    if len(set(group.local_shapes)) == 1:
        return _shape(group.local_shapes[0])
    return "\n".join(f"{ranks}: {_shape(shape)}" for ranks, shape in _runs(group.local_shapes))


def _runs(values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Runs of equal values with the numbers of their ranks: "0-3"."""
    for value, run in groupby(enumerate(values), key=lambda pair: pair[1]):
        ranks = [rank for rank, _ in run]
        yield (str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"), value


def _size_range(sizes: list[int]) -> str:
    from phalanx.training.picture import binary_size

    least, most = binary_size(min(sizes)), binary_size(max(sizes))
    return least if least == most else f"{least} to {most}"


def _memory_table(found: TrainingPlan, narrow: bool = False) -> Table:
    """One line for ranks that hold alike."""
    from rich.table import Table

    from phalanx.training.picture import binary_size

    table = Table(box=None, header_style="dim", padding=(0, 1), pad_edge=False)
    for name in ("rank", *(() if narrow else ("parameters",)), *_MEMORY.values()):
        table.add_column(name, justify="right", no_wrap=not narrow)

    def cells(memory: RankMemory) -> tuple[str, ...]:
        count = () if narrow else (f"{memory.parameters:,}",)
        return (*count, *(binary_size(getattr(memory, name)) for name in _MEMORY))

    for ranks, values in _runs(cells(memory) for memory in found.memory):
        table.add_row(ranks, *values)
    return table
