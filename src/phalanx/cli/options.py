"""The options that commands share: how to print, which engine, how to sample."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}


@dataclass(frozen=True)
class OutputOptions:
    """How a command speaks."""

    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="JSON on standard output, errors too; all else on standard error.",
            rich_help_panel="Output",
        ),
    ] = False
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say what the engine does.", rich_help_panel="Output")
    ] = False
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks of errors.", rich_help_panel="Output")] = False


def _engine(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel="Engine", show_default=False)


@dataclass(frozen=True)
class EngineOptions:
    """Settings of the engine. What is not given is left to EngineConfig."""

    tp: Annotated[int | None, _engine("--tp", help="Ranks that the model is cut over. \\[1]")] = None
    dtype: Annotated[
        str | None, _engine("--dtype", help="float32, bfloat16, float16, float64, or auto: the checkpoint's. \\[auto]")
    ] = None
    device: Annotated[str | None, _engine("--device", help="cpu, cuda or auto. \\[auto]")] = None
    threads: Annotated[int | None, _engine("--threads", help="CPU threads of a rank. \\[the cores, shared out]")] = None
    load_format: Annotated[
        str | None, _engine("--load-format", help="auto, or dummy: random weights of the config's shapes. \\[auto]")
    ] = None
    quantization: Annotated[
        str | None,
        _engine("--quantization", help="fp8, fp8_weights, int8 or int4 weights of the projections. \\[none]"),
    ] = None
    kv_cache_dtype: Annotated[
        str | None, _engine("--kv-cache-dtype", help="auto, or fp8: keys and values in half the memory. \\[auto]")
    ] = None
    batch_invariant: Annotated[
        bool, _engine("--batch-invariant", help="The same tokens whatever stands beside a request, bit for bit.")
    ] = False
    no_cuda_graphs: Annotated[bool, _engine("--no-cuda-graphs", help="Launch every step's kernels one by one.")] = False
    block_size: Annotated[int | None, _engine("--block-size", help="Tokens of a KV block. \\[16]")] = None
    num_blocks: Annotated[int | None, _engine("--num-blocks", help="KV blocks, instead of a size. \\[measured]")] = None
    kv_cache_memory: Annotated[
        str | None, _engine("--kv-cache-memory", metavar="SIZE", help="KV pool of a rank: 2GiB, 500M. \\[measured]")
    ] = None
    memory_fraction: Annotated[
        float | None, _engine("--memory-fraction", help="Share of the free memory for the KV pool. \\[0.9]")
    ] = None
    max_model_len: Annotated[
        int | None, _engine("--max-model-len", help="Longest prompt plus answer. \\[the model's context]")
    ] = None
    max_num_seqs: Annotated[
        int | None, _engine("--max-num-seqs", help="Sequences of a step. \\[64 on the CPU, 256 on a GPU]")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, _engine("--max-num-batched-tokens", help="Tokens of a step. \\[512 on the CPU, 8192 on a GPU]")
    ] = None
    no_prefix_cache: Annotated[
        bool, _engine("--no-prefix-cache", help="Do not share the KV of equal prompt beginnings.")
    ] = False
    loop: Annotated[
        str | None, _engine("--loop", help="plain, async or auto: plain on the CPU, async on a GPU. \\[auto]")
    ] = None
    all_reduce: Annotated[
        str | None, _engine("--all-reduce", help="Of GPUs: shared_memory within a machine, or nccl. \\[shared_memory]")
    ] = None
    op: Annotated[
        list[str], _engine("--op", metavar="OP=NAME", help="Force an op's back end: attention=reference. Repeatable.")
    ] = field(default_factory=list)
    plugin: Annotated[
        list[str], _engine("--plugin", metavar="PACKAGE", help="Import this before loading, on every rank. Repeatable.")
    ] = field(default_factory=list)

    def settings(self) -> dict[str, Any]:
        """What was given, as fields of EngineConfig.

        Raises:
            ValueError: a value that cannot be read.
        """
        given = {
            "tensor_parallel_size": self.tp,
            "dtype": self.dtype,
            "device": self.device,
            "num_threads": self.threads,
            "load_format": self.load_format,
            "quantization": self.quantization,
            "kv_cache_dtype": self.kv_cache_dtype,
            "batch_invariant": True if self.batch_invariant else None,
            "cuda_graphs": False if self.no_cuda_graphs else None,
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "kv_cache_memory": None if self.kv_cache_memory is None else parse_size(self.kv_cache_memory),
            "memory_fraction": self.memory_fraction,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "prefix_cache": False if self.no_prefix_cache else None,
            "loop": self.loop,
            "all_reduce": self.all_reduce,
            "ops": dict(_pair("--op", text) for text in self.op) or None,
            "plugins": tuple(self.plugin) or None,
        }
        return {name: value for name, value in given.items() if value is not None}


def _sampling(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel="Sampling", show_default=False)


@dataclass(frozen=True)
class SamplingOptions:
    """How answers are drawn. What is not given is left to SamplingParams."""

    max_tokens: Annotated[
        int | None, _sampling("--max-tokens", help="Longest answer in tokens. \\[the rest of the context]")
    ] = None
    min_tokens: Annotated[int | None, _sampling("--min-tokens", help="No end before this many tokens. \\[0]")] = None
    temperature: Annotated[float | None, _sampling("--temperature", help="0 takes the likeliest token. \\[0]")] = None
    top_p: Annotated[
        float | None, _sampling("--top-p", help="Draw among the likeliest that reach this probability. \\[1]")
    ] = None
    top_k: Annotated[int | None, _sampling("--top-k", help="Draw among this many likeliest; 0: all. \\[0]")] = None
    min_p: Annotated[
        float | None, _sampling("--min-p", help="Draw among those this fraction as likely as the likeliest. \\[0]")
    ] = None
    seed: Annotated[int | None, _sampling("--seed", help="The same seed draws the same answer. \\[random]")] = None
    n: Annotated[int | None, _sampling("--n", help="Answers to each prompt. \\[1]")] = None
    stop: Annotated[list[str], _sampling("--stop", metavar="TEXT", help="End the answer at this text. Repeatable.")] = (
        field(default_factory=list)
    )
    stop_token_id: Annotated[
        list[int], _sampling("--stop-token-id", metavar="ID", help="End the answer at this token. Repeatable.")
    ] = field(default_factory=list)
    include_stop: Annotated[
        bool, _sampling("--include-stop", help="Leave the stop text or end token in the answer.")
    ] = False
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="Go on after the model's own end tokens.")] = False
    repetition_penalty: Annotated[
        float | None, _sampling("--repetition-penalty", help="For tokens of prompt and answer. \\[1]")
    ] = None
    presence_penalty: Annotated[
        float | None, _sampling("--presence-penalty", help="For tokens of the answer. \\[0]")
    ] = None
    frequency_penalty: Annotated[
        float | None, _sampling("--frequency-penalty", help="The same, for every time that they came. \\[0]")
    ] = None
    logit_bias: Annotated[
        list[str], _sampling("--logit-bias", metavar="ID=BIAS", help="Add to a token's logit. Repeatable.")
    ] = field(default_factory=list)
    bad_word: Annotated[
        list[str], _sampling("--bad-word", metavar="TEXT", help="A text that never comes. Repeatable.")
    ] = field(default_factory=list)
    logprobs: Annotated[
        int | None, _sampling("--logprobs", help="Log-probabilities of the tokens and this many likeliest (JSON).")
    ] = None
    prompt_logprobs: Annotated[
        int | None, _sampling("--prompt-logprobs", help="The same of the prompt's tokens (JSON).")
    ] = None
    keep_special_tokens: Annotated[
        bool, _sampling("--keep-special-tokens", help="Leave special tokens in the text.")
    ] = False
    guide: Annotated[
        str | None,
        _sampling(
            "--guide",
            metavar="KIND=TEXT",
            help="What the answer must look like: json_object, json_schema=SCHEMA, regex=REGEX, grammar=LARK or "
            "choice=LIST; @FILE for a text in a file.",
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        """What was given, as fields of SamplingParams.

        Raises:
            ValueError: a value that cannot be read.
        """
        given = {
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "n": self.n,
            "stop": tuple(self.stop) or None,
            "stop_token_ids": tuple(self.stop_token_id) or None,
            "include_stop": self.include_stop or None,
            "ignore_eos": self.ignore_eos or None,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": dict(_pair("--logit-bias", text) for text in self.logit_bias) or None,
            "bad_words": tuple(self.bad_word) or None,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.prompt_logprobs,
            "skip_special_tokens": False if self.keep_special_tokens else None,
            "guide": None if self.guide is None else _guide(self.guide),
        }
        return {name: value for name, value in given.items() if value is not None}


def check_sampling(settings: dict[str, Any]) -> None:
    """Refuses settings that no request can have, before a model is loaded for them.

    Raises:
        ConfigError: naming each.
    """
    from phalanx.engine.sampling_params import sampling_params

    sampling_params(settings)


def parse_size(text: str) -> int:
    """Bytes of ``500M``, ``2GiB``, ``1.5 GB`` or ``1000000``.

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"([0-9.]+) *([kmg]i?)?b?", text.strip().lower())
    if match is None or match[1].count(".") > 1 or match[1] == ".":
        raise ValueError(f"{text!r} is not a size: write it like 500M, 2GiB or 1000000")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _guide(given: str) -> dict[str, str]:
    kind, _, text = given.partition("=")
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--guide: {text[1:]} cannot be read: {error}") from None
    return {"kind": kind, "text": text}


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{option} takes NAME=VALUE, given {text!r}")
    return name, value
