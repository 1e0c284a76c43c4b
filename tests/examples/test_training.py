"""The training examples print the losses of plain torch, on every grid of ranks."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from tests.examples.forked_ranks import run_cases
from tests.examples.training_cases import FOLDER, example


@pytest.mark.parametrize("world", [2, 4])
def test_losses_are_those_of_torch_alone(world: int, tmp_path: Path) -> None:
    results = run_cases(("tests.examples.training_cases",), world, tmp_path)
    failed = [f"{case} on {world} ranks: {errors[0]}" for case, errors in results.items() if errors]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4])
def test_samples_that_do_not_divide_are_shared_out(dp_size: int) -> None:
    shared_out = example("custom_patterns").SharedOut
    ranks = [iter(shared_out(10, rank, dp_size, seed=5)) for rank in range(dp_size)]
    turns = [list(islice(rank, 60 // dp_size)) for rank in ranks]
    # In turns, whatever the number of ranks, they are the same six passes over all ten.
    stream = [index for turn in zip(*turns, strict=True) for index in turn]
    assert all(sorted(stream[at : at + 10]) == list(range(10)) for at in range(0, 60, 10))
    assert stream == list(islice(shared_out(10, 0, 1, seed=5), 60))
    assert stream[:10] != stream[10:20]


def test_a_text_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(SystemExit, match="has 5 tokens"):
        example("custom_patterns").windows(str(tmp_path / "short.txt"), "any.json", 64)


def test_the_readme_names_every_example() -> None:
    text = (FOLDER / "README.md").read_text()
    for path in [*FOLDER.glob("*.py"), *FOLDER.glob("configs/*.json")]:
        assert path.name in text
