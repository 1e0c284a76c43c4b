"""From training to serving without a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx import LLM
from phalanx.distributed.group import SoloGroup
from phalanx.layout import Partition
from phalanx.weights import WeightError
from tests.models.tiny import llama, llama_config, save
from tests.training.ranks import run_cases


def test_answers_are_those_of_a_model_that_was_written_and_read(tmp_path: Path) -> None:
    results = run_cases(["tests.training.serve_cases"], 2, tmp_path, timeout=400)
    failed = [f"{case}: {errors[0]}" for case, errors in results.items() if errors]
    assert results and not failed, "\n".join(failed)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = llama(llama_config())
    weights = {name: (Partition.replicate(), p.detach()) for name, p in model.named_parameters()}
    with LLM(str(save(model, tmp_path)), num_blocks=16, block_size=4, device="cpu") as llm:
        expected = llm.generate([[5, 6]], max_tokens=4)[0].outputs[0].token_ids
        with pytest.raises(WeightError, match="missing: "):
            llm.update_weights(dict(list(weights.items())[:-1]), SoloGroup())
        with pytest.raises(WeightError, match="no_such"):
            llm.update_weights({**weights, "model.no_such": weights["model.norm.weight"]}, SoloGroup())
        llm.update_weights(weights, SoloGroup())
        assert llm.generate([[5, 6]], max_tokens=4)[0].outputs[0].token_ids == expected
        narrow = {**weights, "model.norm.weight": (Partition.replicate(), torch.ones(3))}
        with pytest.raises(ValueError, match=r"model\.norm\.weight"):
            llm.update_weights(narrow, SoloGroup())
        assert llm.generate([[5, 6]], max_tokens=4)[0].outputs[0].token_ids == expected
        # Nothing that was computed with weights before an update is used after it, not even after one that failed.
        llm.generate([[5, 6, 7, 8, 9, 10, 11, 12, 13]], max_tokens=1)
        assert llm.engine.kv.pool.num_cached
        with pytest.raises(ValueError, match=r"model\.norm\.weight"):
            llm.update_weights(narrow, SoloGroup())
        assert not llm.engine.kv.pool.num_cached
        llm.add_request([5, 6], {"max_tokens": 4})
        with pytest.raises(RuntimeError, match="run or wait"):
            llm.update_weights(weights, SoloGroup())
