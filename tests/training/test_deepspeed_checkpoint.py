"""Checkpoints that DeepSpeed has written."""

from __future__ import annotations

from pathlib import Path

from tests.training.ranks import run_cases


def test_whole_tensors_are_read_and_pieces_refused(tmp_path: Path) -> None:
    results = run_cases(["tests.training.deepspeed_checkpoint_cases"], 2, tmp_path)
    assert results and not [errors for errors in results.values() if errors], results
