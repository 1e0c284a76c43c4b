"""What `phalanx train` is told: one file, TOML or JSON, checked as a whole before anything is loaded."""

from __future__ import annotations

import json
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from phalanx.config import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelRecipe(_Section):
    """What is trained."""

    path: str
    """A Hugging Face folder, a hub id, or "smollm2"."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What it computes in; bfloat16 with float32 master weights."""
    gradient_checkpointing: bool = False
    """Layers are computed again in the backward pass, instead of kept."""


class DataRecipe(_Section):
    """What it is trained on: text files, or JSON Lines with a text or a conversation on each line."""

    train: tuple[str, ...] = Field(min_length=1)
    """Files; patterns with * are expanded. `.jsonl` is JSON Lines, anything else one text."""
    validation: tuple[str, ...] = ()
    text_field: str = "text"
    messages_field: str = "messages"
    """Of lines without a text: a conversation, of which the assistant's part is learnt."""
    sequence_length: int = Field(default=1024, ge=2)
    """Tokens of a sample."""
    packing: bool = True
    """Documents follow one another without padding, an end token between them; else a sample is (the beginning of) one
    document."""


class OptimizationRecipe(_Section):
    """How."""

    batch_size: PositiveInt = 8
    """Samples of a step, over all ranks and passes."""
    micro_batch_size: PositiveInt = 1
    """Samples of one pass of one data-parallel rank."""
    steps: PositiveInt | None = None
    epochs: PositiveFloat | None = None
    """Passes over the data; this or `steps`."""
    learning_rate: PositiveFloat = 2e-5
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    gradient_clipping: float = Field(default=1.0, ge=0)
    seed: int = Field(default=0, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _one_length(self) -> OptimizationRecipe:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("say how long to train: either steps or epochs")
        return self


class ParallelRecipe(_Section):
    """Over how many ranks; what tensor parallelism leaves is data parallelism."""

    tensor_parallel_size: PositiveInt = 1
    zero_stage: int = Field(default=1, ge=0, le=3)
    sequence_parallel: bool = False
    partition_config: dict[str, Any] | None = None
    """Rules of your own, as in a DeepSpeed config."""


class OutputRecipe(_Section):
    """What is written, into one folder."""

    folder: str
    checkpoint_every: PositiveInt | None = None
    """Steps; there is one at the end in any case."""
    keep: PositiveInt = 2
    """Checkpoints that stay."""
    validate_every: PositiveInt | None = None
    """Steps; validation files are read at the end in any case."""
    log_every: PositiveInt = 1
    tensorboard: bool = False
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None
    """First and last step of a profiler's trace."""
    export: bool = True
    """Write the model as a Hugging Face folder at the end."""

    @model_validator(mode="after")
    def _first_before_last(self) -> OutputRecipe:
        if self.profile_steps is not None and self.profile_steps[0] > self.profile_steps[1]:
            raise ValueError("profile_steps are the first and the last step of a trace, in this order")
        return self


class Recipe(_Section):
    """All of it."""

    model: ModelRecipe
    data: DataRecipe
    optimization: OptimizationRecipe
    parallel: ParallelRecipe = ParallelRecipe()
    output: OutputRecipe
    engine: dict[str, Any] = Field(default_factory=dict)
    """Further keys of a DeepSpeed config."""

    def engine_config(self, data_parallel_size: int) -> dict[str, Any]:
        """The config of the training engine.

        Raises:
            ConfigError: batch sizes that do not fit the ranks; a key of `engine` that the recipe says by itself.
        """
        how, parallel = self.optimization, self.parallel
        per_pass = how.micro_batch_size * data_parallel_size
        if how.batch_size % per_pass:
            raise ConfigError(
                f"optimization.batch_size={how.batch_size} is no multiple of micro_batch_size={how.micro_batch_size} x "
                f"{data_parallel_size} data-parallel ranks"
            )
        tensor_parallel: dict[str, Any] = {
            "autotp_size": parallel.tensor_parallel_size,
            "sequence_parallel": parallel.sequence_parallel,
        }
        if parallel.partition_config is not None:
            tensor_parallel["partition_config"] = parallel.partition_config
        own: dict[str, Any] = {
            "train_batch_size": how.batch_size,
            "train_micro_batch_size_per_gpu": how.micro_batch_size,
            "gradient_clipping": how.gradient_clipping,
            "bf16": {"enabled": self.model.dtype == "bfloat16"},
            "zero_optimization": {"stage": parallel.zero_stage},
            "tensor_parallel": tensor_parallel,
        }
        twice = sorted({*own, "optimizer", "scheduler"} & self.engine.keys())
        if twice:
            raise ConfigError(f"engine.{twice[0]}: the recipe says that itself; leave it out of engine")
        return {**own, **self.engine}


def read_recipe(path: str | Path) -> Recipe:
    """The recipe in a file that ends with `.toml` or `.json`; relative paths in it are those of the caller.

    Raises:
        ConfigError: a file that cannot be read or parsed; every unknown, missing or wrong setting by name.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the recipe {path} cannot be read: {error}") from None
    try:
        given = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the recipe {path} is neither TOML (.toml) nor JSON: {error}") from None
    try:
        return Recipe.model_validate(given)
    except ValidationError as error:
        raise ConfigError(f"the recipe {path}: {_faults(error)}") from None


def _faults(error: ValidationError) -> str:
    """Every fault with its section's name; of an unknown setting also what the section knows."""
    said = []
    for fault in error.errors():
        place = ".".join(str(part) for part in fault["loc"]) or "recipe"
        if fault["type"] == "extra_forbidden":
            section: Any = Recipe if len(fault["loc"]) == 1 else Recipe.model_fields[str(fault["loc"][0])].annotation
            near = get_close_matches(str(fault["loc"][-1]), section.model_fields, n=1)
            known = f"did you mean {near[0]}?" if near else f"known: {', '.join(section.model_fields)}"
            said.append(f"{place}: unknown setting; {known}")
        else:
            said.append(f"{place}: {fault['msg'].removeprefix('Value error, ')} (given {fault['input']!r})")
    return "; ".join(said)
