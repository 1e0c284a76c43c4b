"""Loading never holds more than a rank's part and one tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.weights.hf_folder import write_hf_folder
from tests.models.peak_memory import FOLDER, PLUGIN

ROOT = Path(__file__).parents[2]
HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 2048, 8192, 32000, 16, 4, 128
LAYERS = {torch.float32: 15, torch.bfloat16: 32}
"""As many as make 4 GB."""
MARGIN = 200 << 20


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama."""
    layer = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    outer = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (VOCAB, HIDDEN)}
    names = {f"model.layers.{index}.{name}": shape for index in range(layers) for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in {**names, **outer}.items()}


def random_tensors(layers: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes(layers).items():
        yield name, torch.randn(shape, generator=generator).mul_(0.02).to(dtype)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from /proc")
@pytest.mark.parametrize("dtype", LAYERS, ids=str)
def test_a_rank_holds_its_shard_and_one_tensor(dtype: torch.dtype, tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS[dtype],
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "dtype": str(dtype).removeprefix("torch."),
    }
    folder = write_hf_folder(tmp_path / "model", random_tensors(LAYERS[dtype], dtype), config, max_shard_bytes=10**9)
    sizes = [(torch.Size(shape).numel() * dtype.itemsize, len(shape)) for shape in shapes(LAYERS[dtype]).values()]
    assert sum(size for size, _ in sizes) >= 4 * 10**9
    shard = sum(size // 2 if dims == 2 else size for size, dims in sizes)

    (tmp_path / "peaks").mkdir()
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    run = subprocess.run(
        [sys.executable, "-m", PLUGIN, str(folder)],
        env={**os.environ, "PYTHONPATH": paths, FOLDER: str(tmp_path / "peaks")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    peaks = json.loads(run.stdout.splitlines()[-1])
    print(f"shard {shard >> 20} MiB, largest tensor {max(sizes)[0] >> 20} MiB, peaks {[p >> 20 for p in peaks]} MiB")
    assert len(peaks) == 2 and min(peaks) > shard
    assert max(peaks) <= shard + max(sizes)[0] + MARGIN
