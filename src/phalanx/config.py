"""Every setting of an engine, in one schema. Wrong names, types and ranges are refused with the field's name."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator, model_validator

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


class ConfigError(ValueError):
    """A setting that is unknown, out of range or contradicts another; the message names it."""


def parse_dtype(value: str | torch.dtype) -> torch.dtype:
    """The floating dtype called ``value`` (``"bf16"``, ``"torch.bfloat16"``, ``torch.bfloat16``).

    Raises ConfigError, naming the choices, for anything else.
    """
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype {value!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


class EngineConfig(BaseModel):
    """Settings of one serving engine; pass as ``LLM(model, block_size=32, ...)`` or as this object.

    Lengths are in tokens, sizes in bytes. ``None`` means: chosen from the model and the machine at start.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensor_parallel_size: int = Field(default=1, ge=1, le=128)
    """Ranks that one model is cut over; one process each."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: str = "auto"
    """"auto" is the checkpoint's own dtype, float32 where it has none (GGUF)."""
    num_threads: PositiveInt | None = None
    """CPU threads of a rank; default: the machine's cores shared out over the ranks."""
    load_format: Literal["auto", "dummy"] = "auto"
    """"dummy" fills the weights with small random numbers (for benchmarks): only the config is read."""
    quantization: Literal["fp8", "fp8_weights", "int8", "int4"] | None = None
    """Layout of the weights of attention and MLP projections; head, embeddings and norms stay as they are. "fp8" also
    quantises what is multiplied with them, unless the model's hidden size is below 2048: there it is "fp8_weights".
    None serves all weights in ``dtype``."""

    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """"fp8" keeps keys and values as float8_e4m3fn, unscaled, in half the memory; "auto" in the model's dtype."""
    batch_invariant: bool = False
    """A request's tokens do not depend on what stands beside it, its chunks or the number of ranks, bit for bit; slower
    on a GPU. On the CPU nothing changes: there what stands beside a request never matters."""

    block_size: int = Field(default=16, ge=1, le=1024)
    """Tokens of one KV block."""
    num_blocks: int | None = Field(default=None, ge=2)
    """KV blocks of the pool, the dummy block included; overrides the memory settings."""
    kv_cache_memory: PositiveInt | None = None
    """Bytes of the KV pool on a rank; overrides ``memory_fraction``."""
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Share of the device's free memory (after weights and a forward at its limits) that the KV pool may take."""
    prefix_cache: bool = True
    """Share full blocks of equal content between requests."""
    cache_salt: str = ""
    """Part of every prefix-cache key: engines with another salt share nothing."""

    max_model_len: PositiveInt | None = None
    """Longest prompt plus answer; default: the model's own limit (the pool may lower it, said at start)."""
    max_num_seqs: PositiveInt | None = None
    """Sequences of one step (max_ragged_sequence_count); default 64 on the CPU, 256 on a GPU."""
    max_num_batched_tokens: PositiveInt | None = None
    """Tokens of one step (max_ragged_batch_size); default 512 on the CPU, 8192 on a GPU."""
    max_tracked_sequences: PositiveInt = 2048
    """Sequences that ``InferenceEngine`` keeps at once."""
    loop: Literal["auto", "plain", "async"] = "auto"
    """"async" launches step n+1 before the tokens of n are read; default: async on GPUs, plain on the CPU."""
    cuda_graphs: bool = True
    """Replay captured graphs for steps in which every sequence only decodes; a CPU has none."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Makes requests without a seed of their own reproducible, by their order of arrival."""

    ops: dict[str, str] = Field(default_factory=dict)
    """Forced back ends, ``{"attention": "reference"}``; see ``phalanx.ops.registry``."""
    all_reduce: Literal["shared_memory", "nccl"] = "shared_memory"
    """Between GPUs: "shared_memory" adds up tensors by a kernel that writes to the other GPUs' memory, where all are in
    one machine and see each other; of more than two GPUs, large tensors go through NCCL."""
    plugins: tuple[str, ...] = ()
    """Modules that every rank imports before the model is built: they declare policies or register back ends."""
    collective_timeout: float = Field(default=60.0, gt=0)
    """Seconds after which a collective of a step counts as hung."""

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        name = str(value)
        return name if name == "auto" else str(parse_dtype(name)).removeprefix("torch.")

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        budget = self.max_num_batched_tokens
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ValueError("num_blocks and kv_cache_memory both size the KV pool: give one of them")
        if budget is not None and self.max_num_seqs is not None and self.max_num_seqs > budget:
            raise ValueError(
                f"max_num_seqs={self.max_num_seqs} is above max_num_batched_tokens={budget}: "
                "a sequence needs at least one token of a step"
            )
        if self.max_num_seqs is not None and self.max_tracked_sequences < self.max_num_seqs:
            raise ValueError(
                f"max_tracked_sequences={self.max_tracked_sequences} is below max_num_seqs={self.max_num_seqs}"
            )
        return self


def engine_config(config: EngineConfig | dict[str, Any] | None = None, **overrides: Any) -> EngineConfig:
    """An EngineConfig from an object, a dict or keywords (keywords win).

    Raises ConfigError that lists every fault, with the nearest known names for an unknown one.
    """
    given = config.model_dump(exclude_unset=True) if isinstance(config, EngineConfig) else dict(config or {})
    given.update(overrides)
    if isinstance(given.get("dtype"), torch.dtype):
        given["dtype"] = str(given["dtype"])
    try:
        return EngineConfig(**given)
    except ValidationError as error:
        raise ConfigError(explain(error, EngineConfig)) from None


def explain(error: ValidationError, schema: type[BaseModel]) -> str:
    """One line per fault of a pydantic error: the field, what was given, what was expected."""
    from difflib import get_close_matches

    lines = []
    for fault in error.errors():
        name = ".".join(str(part) for part in fault["loc"]) or schema.__name__
        if fault["type"] == "extra_forbidden":
            near = get_close_matches(name, schema.model_fields, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(schema.model_fields)}"
            lines.append(f"{name}: unknown setting; {hint}")
        else:
            message = fault["msg"].removeprefix("Value error, ")
            given = "" if fault["loc"] == () else f" (given {fault['input']!r})"
            lines.append(f"{name}: {message}{given}")
    return "; ".join(lines)
