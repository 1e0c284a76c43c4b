"""What the host does for a step in which every sequence decodes, without what the device does: on any machine.

    python benchmarks/serving/host_time.py --rows 256 --output FILE.json

The engine is whole, of a tiny model; the model's own work is left out. The least of many runs is told: other work on
the machine makes the others longer.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from phalanx import LLM, SamplingParams
from phalanx.bench.machine import machine
from phalanx.engine.decode import Decoded, DecodeStep, decode_sizes

VOCAB = 32000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=400, help="tokens of a prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--runs", type=int, default=12, help="of 32 steps each")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    steps = 32
    with tempfile.TemporaryDirectory() as folder, llm_of(Path(folder), asked.rows, asked.context) as llm:
        chance = random.Random(1)
        params = SamplingParams(max_tokens=1000, ignore_eos=True, temperature=asked.temperature, seed=1)
        for _ in range(asked.rows):
            llm.add_request([chance.randrange(VOCAB) for _ in range(asked.context)], params)
        while llm.core.scheduler.waiting or not all(r.num_generated for r in llm.core.scheduler.running):
            llm.step()
        times = [milliseconds(llm, steps) for _ in range(asked.runs + 2)][2:]
        if len(llm.core.scheduler.running) != asked.rows:
            raise RuntimeError("sequences ended while they were timed: ask for fewer runs")
    found = {"least_ms": min(times), "median_ms": statistics.median(times)}
    print(f"{asked.rows} rows: {found['least_ms']:.3f} ms a step at least, {found['median_ms']:.3f} in the middle")
    if asked.output is not None:
        told = {"command": sys.argv, "machine": machine(), "rows": asked.rows, **found}
        asked.output.write_text(json.dumps(told, indent=1) + "\n")


def llm_of(folder: Path, rows: int, context: int) -> LLM:
    """An engine whose model computes nothing."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(
        **sizes, vocab_size=VOCAB, max_position_embeddings=4096, architectures=["LlamaForCausalLM"]
    ).save_pretrained(folder)
    length = min(4096, context + 1024)
    llm = LLM(
        folder,
        load_format="dummy",
        device="cpu",
        dtype="float32",
        loop="async",
        prefix_cache=False,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        max_model_len=length,
        num_blocks=rows * -(-length // 16) + 1,
    )
    runner = llm.engine.runner
    decode: Any = DecodeStep(runner.model, runner.tokens, runner.block_tables, runner.staging, decode_sizes(rows))
    nothing = Decoded(torch.zeros(rows, VOCAB), torch.full((rows,), 7))
    decode.compute = lambda size: nothing
    runner.decode = decode
    runner.model.forward = lambda batch, **kwargs: torch.zeros(len(batch.logits_indices), VOCAB)  # type: ignore[method-assign]
    return llm


def milliseconds(llm: LLM, steps: int) -> float:
    """Of this process's processor, a step."""
    began = time.process_time()
    for _ in range(steps):
        llm.step()
    return 1e3 * (time.process_time() - began) / steps


if __name__ == "__main__":
    main()
