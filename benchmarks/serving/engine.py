"""Throughput of the engine on a GPU, beside what the GPU could do at best.

    python benchmarks/serving/engine.py --shape llama-8b --output nano.json
    python benchmarks/serving/engine.py --shape llama-8b --tensor-parallel-size 2 --only nano --only decode

Random weights, greedy, end tokens ignored, no prefix cache. Measured: "nano" (256 requests, prompts and answers of
uniformly 100 to 1024 tokens), decoding of equal sequences, and prompts alone. Text is not made.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

import torch  # noqa: E402
from benchmarks.serving.limits import Costs, Limits, StepShape, least_seconds, measure  # noqa: E402
from benchmarks.serving.shapes import SHAPES  # noqa: E402

from phalanx import LLM, SamplingParams  # noqa: E402
from phalanx.bench.machine import machine  # noqa: E402
from phalanx.engine.staging import Readback  # noqa: E402

BYTES = {None: 2, "fp8": 1, "fp8_weights": 1, "int8": 1, "int4": 0.5}
"""Of a parameter of the layers, by the setting `quantization`."""


class Watched:
    """An LLM whose launched steps are noted."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.steps: list[StepShape] = []
        self.last = StepShape(0, 0, 0, 0)
        self.launching: list[float] = []
        self.waiting: list[float] = []
        wait = Readback.wait

        def watched_wait(readback: Readback) -> list[torch.Tensor]:
            begin = time.perf_counter()
            found = wait(readback)
            self.waiting.append(time.perf_counter() - begin)
            return found

        Readback.wait = watched_wait  # type: ignore[method-assign]
        launch = llm.engine.executor.launch

        def noted(step: Any) -> Any:
            begin = time.perf_counter()
            result = launch(step)
            self.launching.append(time.perf_counter() - begin)
            self.last = shape_of(step, self.last)
            self.steps.append(self.last)
            return result

        llm.engine.executor.launch = noted  # type: ignore[method-assign]
        group = llm.engine.model.kv_groups
        model = llm.engine.model
        head = model.vocab_size * model.hidden_size
        held = sum(count for count, _ in model.held_parameters())
        world = llm.config.tensor_parallel_size
        self.costs = Costs(
            layer_parameters=held - head // world * (1 if model.tied_head else 2),
            head_parameters=head // world,
            bytes_per_parameter=BYTES[getattr(llm.config, "quantization", None)],
            kv_bytes=sum(g.bytes_per_token for g in group),
            attention_flops=4 * sum(model.local_heads[0] * model.head_dim for _ in range(model.num_layers)),
        )

    def least(self, limits: Limits) -> float:
        """Seconds that the noted steps take at least."""
        return sum(least_seconds(step, self.costs, limits) for step in self.steps)

    def forget(self) -> None:
        self.steps.clear()
        self.launching.clear()
        self.waiting.clear()


def shape_of(step: Any, last: StepShape) -> StepShape:
    """The shape of a launched step; of one that repeats the last, whose rows are each a token further, from that."""
    rows = step.rows
    if step.further is not None:
        return StepShape(last.tokens, last.logits, last.keys_read + last.tokens, 0)
    return StepShape(
        tokens=sum(row.count for row in rows),
        logits=sum(row.draw for row in rows),
        keys_read=sum(row.start + row.count for row in rows),
        prompt_pairs=sum(row.count * row.start + row.count * (row.count + 1) // 2 for row in rows if row.count > 1),
    )


def nano_requests() -> tuple[list[list[int]], list[int]]:
    """The prompts of the workload, and the length of each answer."""
    chance = random.Random(0)
    prompts = [[chance.randint(0, 10000) for _ in range(chance.randint(100, 1024))] for _ in range(256)]
    return prompts, [chance.randint(100, 1024) for _ in range(256)]


def nano(watched: Watched, limits: Limits) -> dict[str, Any]:
    prompts, lengths = nano_requests()
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    wanted = sum(each.max_tokens or 0 for each in params)
    watched.forget()
    begin = time.perf_counter()
    outputs = watched.llm.generate(prompts, params)
    seconds = time.perf_counter() - begin
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    if made != wanted:
        raise RuntimeError(f"{made} tokens came, {wanted} were asked for")
    return {
        "what": "nano",
        "tokens_per_second": made / seconds,
        "seconds": seconds,
        "roofline_tokens_per_second": made / watched.least(limits),
        "of_roofline": watched.least(limits) / seconds,
        "steps": len(watched.steps),
        "host_seconds_launching": sum(watched.launching),
        "host_seconds_waiting": sum(watched.waiting),
    }


def decode(watched: Watched, limits: Limits, batch: int, context: int, steps: int) -> dict[str, Any] | None:
    llm = watched.llm
    pool = llm.engine.kv.pool.num_blocks - 1
    if batch * -(-(context + steps + 40) // llm.config.block_size) * llm.engine.kv.num_groups > pool:
        return None
    chance = random.Random(1)
    for _ in range(batch):
        prompt = [chance.randrange(10000) for _ in range(context)]
        llm.add_request(prompt, SamplingParams(max_tokens=steps + 40, ignore_eos=True))
    while not all(request.num_generated for request in llm.core.scheduler.running) or llm.core.scheduler.waiting:
        llm.step()
    for _ in range(8):
        llm.step()
    watched.forget()
    begin = time.perf_counter()
    for _ in range(steps):
        llm.step()
    seconds = time.perf_counter() - begin
    busy = seconds - sum(watched.waiting)
    least = watched.least(limits)
    while llm.has_work:
        llm.step()
    return {
        "what": f"decode b{batch} at {context}",
        "tokens_per_second": batch * steps / seconds,
        "step_ms": seconds / steps * 1e3,
        "host_ms": busy / steps * 1e3,
        "of_roofline": least / seconds,
    }


def prefill(watched: Watched, limits: Limits) -> dict[str, Any]:
    chance = random.Random(2)
    best: dict[str, Any] = {}
    for _ in range(4):
        prompts = [[chance.randrange(10000) for _ in range(1024)] for _ in range(8)]
        watched.forget()
        begin = time.perf_counter()
        watched.llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
        seconds = time.perf_counter() - begin
        if not best or seconds < best["seconds"]:
            best = {
                "what": "prefill 8 x 1024",
                "tokens_per_second": 8192 / seconds,
                "seconds": seconds,
                "of_roofline": watched.least(limits) / seconds,
            }
    return best


def few(llm: LLM, count: int, tokens: int) -> dict[str, Any]:
    """The first prompts of nano with equal answers, as transformers answers them too."""
    prompts, _ = nano_requests()
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate(prompts[:count], params)
    seconds = time.perf_counter() - begin
    return {"what": peer_workload(count, tokens), "tokens_per_second": count * tokens / seconds, "seconds": seconds}


def peer_workload(count: int, tokens: int) -> str:
    return f"first {count} prompts of nano, {tokens} tokens each"


def transformers_few(shape: dict[str, Any], count: int, tokens: int) -> dict[str, Any]:
    """The same through transformers' continuous batching, random weights too."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from phalanx.bench.transformers_peer import Transformers
    from phalanx.bench.workload import Workload

    config = CONFIG_MAPPING[shape["model_type"]].from_dict(dict(shape))
    device = torch.device("cuda")
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    peer = Transformers(model, "continuous", torch.bfloat16, device, None)
    prompts, _ = nano_requests()
    peer.answer(Workload(prompts[:2], [8, 8]))
    begin = time.perf_counter()
    peer.answer(Workload(prompts[:count], [tokens] * count))
    seconds = time.perf_counter() - begin
    peer.close()
    return {
        "what": f"transformers, continuous batching, {peer_workload(count, tokens)}",
        "tokens_per_second": count * tokens / seconds,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-8b")
    parser.add_argument("--only", action="append", choices=["nano", "decode", "prefill"])
    parser.add_argument("--batch", type=int, action="append", help="batch sizes of decode; default 1, 8, 64, 256")
    parser.add_argument("--context", type=int, action="append", help="contexts of decode; default 1024")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="settings of the engine")
    parser.add_argument("--peer", type=int, metavar="N", help="transformers beside us on the first N prompts of nano")
    parser.add_argument("--peer-tokens", type=int, default=64, help="the length of each answer there; default 64")
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    given = parser.parse_args()
    settings = {name: _value(text) for name, _, text in (item.partition("=") for item in given.set)}
    wanted = given.only or ["nano", "decode", "prefill"]

    limits = measure()
    gc.collect()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[given.shape]))
        begin = time.perf_counter()
        llm = LLM(
            folder,
            load_format="dummy",
            prefix_cache=False,
            tensor_parallel_size=given.tensor_parallel_size,
            **{"max_model_len": 16384, **settings},
        )
        built = time.perf_counter()
        llm.generate([[1, 2, 3]], max_tokens=1, ignore_eos=True)
        first = time.perf_counter()
    watched = Watched(llm)
    results: list[dict[str, Any]] = [
        {
            "what": "start to first token",
            "seconds": first - begin,
            "imports_seconds": begin - STARTED,
            "first_request_seconds": first - built,
        }
    ]
    _say(results[-1])
    if "prefill" in wanted:
        results.append(prefill(watched, limits))
        _say(results[-1])
    if "decode" in wanted:
        for context in given.context or [1024]:
            for batch in given.batch or [1, 8, 64, 256]:
                point = decode(watched, limits, batch, context, given.steps)
                if point is not None:
                    results.append(point)
                    _say(point)
    if "nano" in wanted:
        results.append(nano(watched, limits))
        _say(results[-1])
    if given.peer:
        results.append(few(llm, given.peer, given.peer_tokens))
        _say(results[-1])
    llm.close()
    if given.peer:
        del watched, llm
        gc.collect()
        torch.cuda.empty_cache()
        results.append(transformers_few(SHAPES[given.shape], given.peer, given.peer_tokens))
        _say(results[-1])
    report = {
        "shape": given.shape,
        "command": "python " + " ".join(sys.argv),
        "settings": {"tensor_parallel_size": given.tensor_parallel_size, **settings},
        "limits": {"read_bytes_per_second": limits.read, "bf16_flops": limits.matmul},
        "machine": machine(),
        "results": results,
    }
    if given.output:
        given.output.write_text(json.dumps(report, indent=1) + "\n")


def _say(result: dict[str, Any]) -> None:
    numbers = ", ".join(f"{name} {value:,.3f}" for name, value in result.items() if isinstance(value, (int, float)))
    print(f"{result['what']}: {numbers}", flush=True)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
