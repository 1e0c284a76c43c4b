"""Runs a plan on vLLM: ``python vllm_script.py ORDER.json RESULT.json``, in an environment that has vllm.

Stands alone: that environment does not have phalanx. What it reads is written by ``vllm_peer.py``.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt, __version__


def params(length: int) -> SamplingParams:
    """Greedy, of this length, without text."""
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)


def answers(llm: LLM, workload: dict[str, Any]) -> dict[str, Any]:
    """All prompts at once."""
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in workload["prompts"]]
    each = [params(length) for length in workload["output_lens"]]
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, each, use_tqdm=False)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    found = [list(output.outputs[0].token_ids) for output in outputs]
    return {"wall_s": wall, "cpu_s": cpu, "answers": found, "token_times": []}


def streams(llm: LLM, workload: dict[str, Any]) -> dict[str, Any]:
    """One prompt after the other, each token timed."""
    found, times = [], []
    wall, cpu = time.perf_counter(), time.process_time()
    for number, (prompt, length) in enumerate(zip(workload["prompts"], workload["output_lens"], strict=True)):
        stamps: list[float] = []
        tokens: list[int] = []
        begun = time.perf_counter()
        name = f"{begun}-{number}"
        llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params(length))
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                tokens = list(output.outputs[0].token_ids)
                stamps += [time.perf_counter() - begun] * (len(tokens) - len(stamps))
        found.append(tokens)
        times.append(stamps)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"wall_s": wall, "cpu_s": cpu, "answers": found, "token_times": times}


def main(order_file: str, result_file: str) -> None:
    """Warms up, measures, writes the samples."""
    with open(order_file) as file:
        order = json.load(file)
    plan = order["plan"]
    llm = LLM(**order["settings"], enable_prefix_caching=False, disable_log_stats=True)
    run = answers if plan["kind"] == "throughput" else streams
    run(llm, plan["warm_up"])
    samples = [run(llm, plan["workload"]) for _ in range(plan["repeats"])]
    with open(result_file, "w") as file:
        json.dump({"version": __version__, "samples": samples}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
