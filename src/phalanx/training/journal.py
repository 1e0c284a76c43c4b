"""What a run says while it trains: a line of JSON a step, TensorBoard, a progress bar."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Dense bf16 tensor-core FLOP/s, from the makers' data sheets; by a part of the device's name.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}


def flops_of_token(module: nn.Module, length: int, parameters: int) -> float:
    """FLOPs of forward and backward of one token: 6 a parameter that multiplies it, and the attention's products
    (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), causal ones counted half.

    Args:
        parameters: of the whole model, the input embedding left out where it is not the head as well.
    """
    config: Any = getattr(module, "config", None)
    layers, heads = (getattr(config, name, 0) or 0 for name in ("num_hidden_layers", "num_attention_heads"))
    width = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", 0) // heads if heads else 0)
    return 6.0 * parameters + 6.0 * layers * heads * width * length


def peak_flops(device: torch.device) -> float | None:
    """Of one GPU in bf16; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for part, value in PEAK_FLOPS.items() if part in name), None)


class Journal:
    """Written by rank 0; the others have one that says nothing.

    Args:
        folder: of the run. `log.jsonl` in it is continued: lines of steps after `start` are taken out.
        start: steps that were done before.
        steps: at the end.
        tensorboard: also write TensorBoard's events.

    Raises:
        ImportError: `tensorboard` without the package.
    """

    def __init__(self, folder: Path, start: int, steps: int, *, tensorboard: bool, silent: bool) -> None:
        self.silent = silent
        self._board: Any = None
        self._bar: Any = None
        if silent:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "log.jsonl"
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        kept = [line for line in lines if _is_of(line, start)]
        aside = path.with_name(".log.new")
        aside.write_text("".join(f"{line}\n" for line in kept))
        aside.replace(path)
        self._file = path.open("a")
        if tensorboard:
            try:
                from torch.utils.tensorboard.writer import SummaryWriter
            except ImportError as error:
                raise ImportError(
                    "output.tensorboard needs the package tensorboard: pip install tensorboard"
                ) from error
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)
        if sys.stderr.isatty():
            self._bar = _bar(start, steps)
        self._steps = steps

    def say(self, figures: Mapping[str, Any]) -> None:
        """The figures of a step, `step` among them; None is left out of the charts."""
        if self.silent:
            return
        self._file.write(json.dumps(dict(figures)) + "\n")
        self._file.flush()
        step = int(figures["step"])
        if self._board is not None:
            for name, value in figures.items():
                if name != "step" and isinstance(value, (int, float)):
                    self._board.add_scalar(name, value, step)
        text = "  ".join(f"{name} {_short(value)}" for name, value in figures.items() if value is not None)
        if self._bar is not None:
            self._bar.update(0, completed=step, figures=text)
        else:
            print(f"{text}  of {self._steps}", file=sys.stderr)

    def close(self) -> None:
        """Ends the bar and the files."""
        if self.silent:
            return
        if self._bar is not None:
            self._bar.stop()
        if self._board is not None:
            self._board.close()
        self._file.close()


def _is_of(line: str, last: int) -> bool:
    """Whether a line of a log is of a step up to `last`. A run that was killed may have left one that is cut off."""
    try:
        return int(json.loads(line)["step"]) <= last
    except (ValueError, TypeError, KeyError):
        return False


def _bar(start: int, steps: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
        console=Console(stderr=True),
    )
    bar.add_task("training", total=steps, completed=start, figures="")
    bar.start()
    return bar


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
