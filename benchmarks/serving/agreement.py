"""How far the fast engine's bf16 answers differ from the plain one's, token by token.

    python benchmarks/serving/agreement.py --shape llama-1b --output agreement.json

The engine as it is by default on a GPU (graphs, asynchronous) answers greedily. A plain eager engine then reads prompt
and answer, in pieces, and says at each position of the answer what it would have said there. Where the two differ, the
answer's token must be nearly as likely as the plain engine's own: the difference is set against the noise, by which
the two engines' log-probabilities of one and the same token differ.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.serving.shapes import SHAPES

from phalanx import LLM, SamplingParams
from phalanx.bench.machine import machine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-1b")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    chance = random.Random(3)
    prompts = [[chance.randrange(10000) for _ in range(chance.randint(1, 600))] for _ in range(given.requests)]
    common: dict[str, Any] = {"load_format": "dummy", "prefix_cache": False, "max_model_len": 2048}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[given.shape]))
        with LLM(folder, tensor_parallel_size=given.tensor_parallel_size, **common) as fast:
            said = fast.generate(prompts, SamplingParams(max_tokens=given.length, ignore_eos=True, logprobs=1))
        with LLM(folder, loop="plain", cuda_graphs=False, max_num_batched_tokens=777, **common) as plain:
            texts = [prompt + answer.outputs[0].token_ids for prompt, answer in zip(prompts, said, strict=True)]
            read = plain.generate(texts, SamplingParams(max_tokens=0, prompt_logprobs=1))
    noise, gaps = [], []
    for prompt, answer, again in zip(prompts, said, read, strict=True):
        theirs = (again.prompt_logprobs or [])[len(prompt) :]
        for token, own, other in zip(
            answer.outputs[0].token_ids, answer.outputs[0].logprobs or [], theirs, strict=True
        ):
            if other is None:
                raise RuntimeError("a position of the answer has no log-probabilities")
            noise.append(abs((own[token] or 0.0) - (other[token] or 0.0)))
            best = max(value for value in other.values() if value is not None)
            if best > (other[token] or 0.0):
                gaps.append(best - (other[token] or 0.0))
    report = {
        "shape": given.shape,
        "command": "python " + " ".join(sys.argv),
        "tensor_parallel_size": given.tensor_parallel_size,
        "positions": len(noise),
        "noise_median": float(np.median(noise)),
        "noise_p99": float(np.quantile(noise, 0.99)),
        "noise_max": max(noise),
        "positions_that_differ": len(gaps),
        "largest_gap_where_they_differ": max(gaps, default=0.0),
        # Both tokens' log-probabilities may be off by the noise.
        "within_twice_the_noise": max(gaps, default=0.0) <= 2 * max(noise),
        "machine": machine(),
    }
    print(json.dumps({name: value for name, value in report.items() if name != "machine"}, indent=1))
    if given.output:
        given.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["within_twice_the_noise"] else 1


if __name__ == "__main__":
    sys.exit(main())
