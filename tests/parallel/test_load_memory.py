"""A rank that loads in slices never holds more than its shard and one tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phalanx.weights.hf_folder import write_hf_folder
from tests.models.test_load_memory import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    MARGIN,
    VOCAB,
    random_tensors,
    shapes,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from /proc")
@pytest.mark.parametrize("dtype", LAYERS, ids=str)
def test_peak_memory(dtype: torch.dtype, tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS[dtype],
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
    }
    folder = write_hf_folder(tmp_path / "model", random_tensors(LAYERS[dtype], dtype), config, max_shard_bytes=10**9)
    sizes = [(torch.Size(shape).numel() * dtype.itemsize, len(shape)) for shape in shapes(LAYERS[dtype]).values()]
    assert sum(size for size, _ in sizes) >= 4 * 10**9
    shard = sum(size // 2 if dims == 2 else size for size, dims in sizes)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    result = tmp_path / "peaks.json"
    subprocess.run(
        [*launch, "-m", "tests.parallel.peak_memory", str(folder), str(result)],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([f"{ROOT}/src", os.environ.get("PYTHONPATH", "")]),
        },
        check=True,
        timeout=600,
    )
    peaks = json.loads(result.read_text())
    largest = max(size for size, _ in sizes)
    print(f"{dtype}: shard {shard >> 20} MiB, largest {largest >> 20} MiB, peaks {[p >> 20 for p in peaks]} MiB")
    for peak in peaks:
        assert shard * 0.9 < peak <= shard + largest + MARGIN
