"""Loads a model over two ranks in slices; writes the bytes that each took above its imports. Run by torchrun."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from phalanx.distributed.mesh import Mesh
from phalanx.parallel import from_pretrained, parallelize
from tests.models.peak_memory import resident


def main(folder: str, result: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = Mesh.build(2)
    # A first tiny model brings the modules in that a model needs.
    AutoModelForCausalLM.from_config(small_config())
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS", os.getpid())
    model = from_pretrained(folder)
    parallelize(model, mesh)
    peak = resident("VmHWM", os.getpid()) - before
    everyones = [0, 0]
    dist.all_gather_object(everyones, peak)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(everyones))
    dist.destroy_process_group()


def small_config() -> object:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=8,
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
