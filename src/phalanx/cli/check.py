"""``phalanx check``: is a model served as transformers computes it, and where does it first differ?"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.option_groups import grouped
from phalanx.cli.options import OutputOptions

if TYPE_CHECKING:
    from phalanx.engine.check import Comparison

DIFFERS = 1


@grouped
def check(
    model: Annotated[
        str, typer.Argument(help="A model as `generate` takes it, or a folder or config.json without weights.")
    ],
    random: Annotated[
        bool,
        typer.Option(
            "--random", help="Compare a small random model of this config, not the weights. \\[without weights]"
        ),
    ] = False,
    tokens: Annotated[int, typer.Option("--tokens", min=8, help="Length of the random sequence.")] = 24,
    tp: Annotated[str, typer.Option("--tp", help="Tensor-parallel sizes to try.")] = "1,2",
    seed: Annotated[int, typer.Option("--seed", help="Of the tokens and of random weights.")] = 0,
    plugin: Annotated[
        list[str] | None, typer.Option("--plugin", help="A package to import first, which declares models.")
    ] = None,
    *,
    output: OutputOptions,
) -> None:
    """Compare a model with transformers layer by layer: at once, in pieces, token by token, at several TP sizes.

    Exit code 0 where all is equal, 1 where something differs.
    """
    from phalanx.cli.running import fetched, notes, sayer, set_logging

    set_logging(output)
    console, sizes = notes(), _sizes(tp)
    with console.status(f"reading {model}") as status:
        fetched(model, sayer(console, status))
        found = compare(
            model, random=random, tokens=tokens, tp=sizes, seed=seed, plugins=plugin or [], progress=status.update
        )
    if output.json:
        typer.echo(
            json.dumps({"model": model, **found, "comparisons": [asdict(c) for c in found["comparisons"]]}, indent=2)
        )
    else:
        _print(found)
    if any(each.first is not None for each in found["comparisons"]):
        raise typer.Exit(DIFFERS)


def compare(
    model: str, *, random: bool, tokens: int, tp: list[int], seed: int, plugins: list[str], progress: Any = print
) -> dict[str, Any]:
    """What ``check`` finds: ``weights`` ("real" or "random"), ``model_type``, ``served_by`` (the policy's name) and
    ``comparisons``.

    Raises ConfigError where plugins are given and none of them, nor anything else, declares the model's type.
    """
    import torch

    from phalanx.config import ConfigError, engine_config
    from phalanx.engine.check import check_model, random_reference
    from phalanx.engine.opened_model import OpenedModel, load_policies
    from phalanx.models.generic import GenericPolicy
    from phalanx.models.policy import policy_for

    load_policies(engine_config(plugins=tuple(plugins)))
    from phalanx.engine.opened_model import locate

    path = locate(model) or Path(model)
    folder = path.parent if path.name == "config.json" else path
    opened = OpenedModel(str(folder))
    policy = policy_for(opened.config)
    if plugins and issubclass(policy, GenericPolicy):
        raise ConfigError(
            f"{', '.join(plugins)} declares no model of the type {opened.config['model_type']!r}: correct the "
            "`model_types` of its policy, or leave out --plugin to check the generic path"
        )
    patterns = ("*.safetensors", "*.bin", "*.gguf")
    has_weights = folder.is_file() or any(any(folder.glob(pattern)) for pattern in patterns)
    generator = torch.Generator().manual_seed(seed)
    with tempfile.TemporaryDirectory() as scratch:
        if random or not has_weights:
            progress("building a random model")
            reference: Any = random_reference(opened.config, seed=seed)
            reference.save_pretrained(scratch)
            source: Any = scratch
        else:
            progress("loading with transformers")
            reference, source = _real_reference(folder), str(folder)
        ids = torch.randint(0, reference.config.get_text_config().vocab_size, (tokens,), generator=generator).tolist()
        comparisons = check_model(reference, source, ids, tp_sizes=tp, progress=progress)
    return {
        "model_type": opened.config["model_type"],
        "served_by": policy.__name__,
        "weights": "random" if random or not has_weights else "real",
        "comparisons": comparisons,
    }


def _real_reference(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if path.is_file():
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options).eval()
    return AutoModelForCausalLM.from_pretrained(path, **options).eval()


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise typer.BadParameter(f"--tp {text}: expected sizes such as 1,2")
    return sizes


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    comparisons: list[Comparison] = found["comparisons"]
    points = [point.point for point in comparisons[0].points]
    table = Table(box=None, header_style="bold")
    table.add_column("relative difference", no_wrap=True)
    for each in comparisons:
        table.add_column(f"tp {each.tp}\n{each.given}", justify="right")
    for row, name in enumerate(points):
        cells = []
        for each in comparisons:
            point = each.points[row]
            colour = "green" if point.token is None else "red"
            cells.append(f"[{colour}]{point.relative:.1e}[/{colour}]")
        table.add_row(name, *cells)
    console = Console()
    console.print(
        f"{found['model_type']}, served by {found['served_by']}, {found['weights']} weights, against transformers in "
        "float32"
    )
    console.print(table)
    first = next((each for each in comparisons if each.first is not None), None)
    if first is None or first.first is None:
        where = "at every layer" if len(points) > 1 else "in its logits, all that the generic path can show"
        console.print(f"[green]Equal {where}, in every way of serving.[/green]")
    else:
        at = first.first
        console.print(
            f"[red]First difference: {at.point}, token {at.token}, relative {at.relative:.1e} "
            f"(tp {first.tp}, {first.given}).[/red]"
        )
