"""The training examples on ranks; see `tests.training.ranks`. Expected losses come from one process and torch alone."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = Path(__file__).parents[2] / "examples" / "training"
STEPS = 3


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"training_example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def torch_alone(config: str, batches: Iterator[Tensor], lr: float, clip: float) -> list[tuple[float, float]]:
    """The loss and the norm of the gradient in each step of a plain loop over whole batches."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER / "configs" / config)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    found = []
    for ids in itertools.islice(batches, STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


@functools.cache
def counting() -> list[tuple[float, float]]:
    """What `basic` learns: 8 samples a step that count upwards from drawn starts."""
    generator = torch.Generator().manual_seed(0)
    starts = (torch.randint(263, (8, 1), generator=generator) for _ in itertools.count())
    return torch_alone("llama-tiny.json", ((start + torch.arange(32)) % 263 for start in starts), lr=3e-3, clip=1.0)


@functools.cache
def reading() -> list[tuple[float, float]]:
    """What `custom_patterns` learns: 4 pieces of 64 bytes of its source a step."""
    source = (FOLDER / "custom_patterns.py").read_bytes()
    pieces = [torch.tensor(list(source[at : at + 64])) for at in range(0, len(source) - 63, 64)]
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist()
    batches = (torch.stack([pieces[i] for i in order[at : at + 4]]) for at in itertools.count(0, 4))
    return torch_alone("gpt-neox-tiny.json", batches, lr=1e-3, clip=float("inf"))


def printed(name: str, *arguments: str) -> str:
    """What the example prints on rank 0; the others print nothing."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        example(name).main(["--steps", str(STEPS), *arguments])
    if dist.get_rank():
        assert out.getvalue() == ""
    return out.getvalue()


def basic(arguments: str, tolerance: float = 1e-4) -> None:
    expected = counting()
    text = printed("basic", *arguments.split())
    found = re.findall(r"^step \d+ loss (\S+) norm (\S+)", text, re.MULTILINE)
    if dist.get_rank() == 0:
        assert [tuple(map(float, pair)) for pair in found] == [pytest.approx(pair, rel=tolerance) for pair in expected]


def custom(arguments: str) -> None:
    expected = reading()
    text = printed("custom_patterns", *arguments.split())
    found = re.findall(r"^step \d+ loss (\S+)", text, re.MULTILINE)
    if dist.get_rank() == 0:
        assert [float(loss) for loss in found] == pytest.approx([loss for loss, _ in expected], rel=1e-4)
        tp = int(re.search(r"--tp (\d)", arguments)[1])  # type: ignore[index]
        assert f"query_key_value.weight [192, 64] is [{192 // tp}, 64]" in text


def refused() -> None:
    with pytest.raises(ValueError, match="each head's") as error:
        example("custom_patterns").main(["--tp", "2", "--qkv", "stacked"])
    assert "layers.0.attention.query_key_value.weight is cut as layer_specs[0]" in str(error.value)


def cases(world: int) -> dict[str, Callable[[], None]]:
    runs = {
        2: [
            (basic, "--tp 2 --zero 0"),
            (basic, "--tp 2 --sequence-parallel --accumulate 2"),
            (basic, "--tp 1 --zero 1 --accumulate 2"),
            (basic, "--tp 1 --zero 3"),
            (custom, "--tp 2 --zero 1"),
            (custom, "--tp 1 --zero 2"),
        ],
        4: [
            (basic, "--tp 2 --zero 2"),
            (basic, "--tp 2 --zero 3 --sequence-parallel"),
            (basic, "--tp 4"),
            (custom, "--tp 2 --zero 2"),
        ],
    }
    named = {f"{run.__name__} {text}": functools.partial(run, text) for run, text in runs[world]}
    if world == 2:
        named["basic in bf16"] = functools.partial(basic, "--tp 2 --zero 2 --precision bf16", 0.03)
        named["custom_patterns --qkv stacked"] = refused
    return named
