"""Rules as people write them: which weights a pattern means, and by what they are cut.

    {"layer_specs": [
        {"patterns": [".*\\.o_proj\\.weight$"], "partition_type": "row"},
        {"patterns": [".*\\.qkv_proj\\.weight$"], "shape": [[4096, 1024, 1024], -1], "partition_dim": 0},
        {"patterns": [".*\\.query_key_value\\.weight$"], "view": [32, 3, 128], "axis": 0}]}

The syntax is that of DeepSpeed's `tensor_parallel.partition_config`; `view`, `axis` and the type `vocab` are ours.
Everything that can be known without the model is checked here; what needs the weights, in `decide`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from phalanx.layout.weight import AttentionShape as AttentionShape
from phalanx.layout.weight import Weight as Weight

PartitionType = Literal["column", "row", "vocab", "skip"]
PARTITION_TYPES: tuple[PartitionType, ...] = get_args(PartitionType)
Shape = tuple[int | tuple[int, ...], ...]


class RuleError(ValueError):
    """Rules that cannot be followed. `problems` holds one sentence for each fault, all of them in the message."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"the partition rules have {count}:\n" + "\n".join(f"- {problem}" for problem in problems))


@dataclass(frozen=True)
class LayerSpec:
    """How the weights whose full names match one of `patterns` are cut.

    patterns        regular expressions, matched from the start of the name as by `re.match`; the first spec that
                    matches a weight decides.
    partition_type  "column" (output features), "row" (input features), "vocab" (rows of an embedding or output head),
                    "skip" (every rank holds the whole weight).
    shape           the weight [out, in] seen with more dimensions, the input features last. At `partition_dim` stand
                    the sizes of its sub-parameters, or their count if they are equal; elsewhere sizes. -1 is inferred.
    partition_dim   the dimension of `shape` that is cut: for "row" the last, which is its default; else 0 by default.
    view, axis      the output features as a grid of sizes (one may be -1), and the axis of it that is cut.
    model_types     the spec holds for these model types only.
    gather_output   column: every rank gets the whole output.
    grad_allreduce  skip: each rank computes a part of the gradient, so it is summed over the ranks.
    """

    patterns: tuple[str, ...]
    partition_type: PartitionType = "column"
    shape: Shape | None = None
    partition_dim: int | None = None
    view: tuple[int, ...] | None = None
    axis: int = 0
    model_types: tuple[str, ...] | None = None
    gather_output: bool = False
    grad_allreduce: bool = False

    def __post_init__(self) -> None:
        problems = [*self._pattern_problems(), *self._type_problems(), *self._shape_problems(), *self._view_problems()]
        if problems:
            raise RuleError(problems)

    def holds_for(self, model_type: str | None) -> bool:
        """Whether the spec is meant for models of this type. With `model_types`, never for an unknown type."""
        if self.model_types is None:
            return True
        return model_type is not None and model_type.lower() in (each.lower() for each in self.model_types)

    def matching(self, name: str) -> str | None:
        """The first pattern that matches the full parameter name.

        A parameter that is not called `weight` (all experts of a layer in one tensor) is also known as `name.weight`.
        """
        names = (name,) if name.endswith(".weight") else (name, f"{name}.weight")
        return next((each for each in self.patterns if any(re.match(each, name) for name in names)), None)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayerSpec:
        """The spec that a JSON object describes. Raises RuleError with all of its faults."""
        if not isinstance(data, Mapping):
            raise RuleError([f"a layer spec must be an object with the key 'patterns', got {data!r}"])
        problems = unknown_keys(data, (field.name for field in fields(cls)))
        values: dict[str, Any] = {key: value for key, value in data.items() if value is not None}
        patterns = values.get("patterns", ())
        if isinstance(patterns, str) or not isinstance(patterns, Sequence):
            problems.append(f"'patterns' must be a list of regular expressions, got {patterns!r}")
        for key in ("gather_output", "grad_allreduce"):
            if not isinstance(values.get(key, False), bool):
                problems.append(f"'{key}' must be true or false, got {values[key]!r}")
        if not isinstance(values.get("partition_type", ""), str):
            problems.append(
                f"'partition_type' must be one of {_listed(PARTITION_TYPES)}, got {data['partition_type']!r}"
            )
        for key in ("partition_dim", "axis"):
            if key in values and not _is_int(values[key]):
                problems.append(f"'{key}' must be a whole number, got {values[key]!r}")
        if "axis" in values and "view" not in values:
            problems.append("'axis' names an axis of 'view', which is missing")
        for key in ("shape", "view", "model_types"):
            if key in values and (isinstance(values[key], str) or not isinstance(values[key], Sequence)):
                problems.append(f"'{key}' must be a list, got {values[key]!r}")
        types = values.get("model_types", ())
        if not isinstance(types, str) and not all(isinstance(each, str) for each in types):
            problems.append(f"'model_types' must be a list of names, got {types!r}")
        if problems:
            raise RuleError(problems)
        for key in ("patterns", "shape", "view", "model_types"):
            if key in values:
                values[key] = _tuples(values[key])
        if "partition_type" in values:
            values["partition_type"] = values["partition_type"].lower()
        return cls(**{"patterns": (), **values})

    def _pattern_problems(self) -> list[str]:
        if not self.patterns:
            return ["'patterns' must name at least one regular expression"]
        problems = []
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                problems.append(f"pattern {pattern!r} is not a regular expression: {error}")
        return problems

    def _type_problems(self) -> list[str]:
        kind = self.partition_type
        if kind not in PARTITION_TYPES:
            return [
                f"unknown partition_type {kind!r}{near(str(kind), PARTITION_TYPES)}: use {_listed(PARTITION_TYPES)}"
            ]
        problems = []
        laid_out = self.shape is not None or self.view is not None
        if kind in ("vocab", "skip") and laid_out:
            problems.append(f"partition_type {kind!r} takes neither 'shape' nor 'view'")
        if kind == "row" and self.view is not None:
            problems.append("'view' lays out output features, which 'row' does not cut: use 'shape'")
        if kind == "row" and self.partition_dim is not None and self.partition_dim != self._last_dim:
            problems.append(
                f"'row' cuts the input features, which are dim {self._last_dim}, but partition_dim is "
                f"{self.partition_dim}: cutting output features and adding the results up computes another function. "
                "Drop partition_dim, or use partition_type 'column'"
            )
        if kind == "column" and self.partition_dim is not None and self.partition_dim == self._last_dim:
            problems.append(
                f"'column' cuts output features, but partition_dim {self.partition_dim} is the input features: use "
                "partition_type 'row', or another partition_dim"
            )
        if self.gather_output and kind not in ("column", "vocab"):
            problems.append(f"'gather_output' is for partition_type 'column', not {kind!r}")
        if self.gather_output and laid_out:
            problems.append(
                "'gather_output' cannot be combined with 'shape' or 'view': the gathered order would differ"
            )
        if self.grad_allreduce and kind != "skip":
            problems.append(f"'grad_allreduce' is for partition_type 'skip', not {kind!r}: cut weights need none")
        return problems

    @property
    def _last_dim(self) -> int:
        return 1 if self.shape is None else len(self.shape) - 1

    def _shape_problems(self) -> list[str]:
        if self.shape is None:
            if self.partition_dim in (None, 0, 1):
                return []
            return [f"partition_dim {self.partition_dim} is not a dimension of a weight [out, in]: use 0 or 1"]
        if self.view is not None:
            return ["give either 'shape' or 'view', not both"]
        if len(self.shape) < 2:
            return [f"shape {list(self.shape)} needs at least two dimensions: [out, in]"]
        dim = self.cut_dim
        if not 0 <= dim < len(self.shape):
            return [f"partition_dim {dim} is outside of shape {list(self.shape)}: use 0..{len(self.shape) - 1}"]
        problems = []
        for index, entry in enumerate(self.shape):
            if isinstance(entry, tuple):
                if index != dim:
                    problems.append(
                        f"shape {list(self.shape)}: sub-parameter sizes may stand at partition_dim {dim} only"
                    )
                elif not entry or not all(_is_int(size) and size > 0 for size in entry):
                    problems.append(f"shape {list(self.shape)}: sub-parameter sizes must be positive whole numbers")
            elif not _is_int(entry) or (entry != -1 and entry < 1):
                problems.append(f"shape {list(self.shape)}: {entry!r} must be -1 or a positive whole number")
        return problems

    def _view_problems(self) -> list[str]:
        if self.view is None:
            return []
        view = list(self.view)
        problems = []
        if self.partition_dim is not None:
            problems.append("'partition_dim' belongs to 'shape': with 'view' use 'axis'")
        if not view or not all(_is_int(size) and (size == -1 or size > 0) for size in view) or view.count(-1) > 1:
            problems.append(f"view {view} must hold positive whole numbers, and -1 at most once")
        if not 0 <= self.axis < len(view):
            problems.append(f"axis {self.axis} is outside of view {view}: use 0..{len(view) - 1}")
        return problems

    @property
    def cut_dim(self) -> int:
        """The dimension of `shape` that is cut."""
        if self.partition_dim is not None:
            return self.partition_dim
        return self._last_dim if self.partition_type == "row" else 0


@dataclass(frozen=True)
class PartitionConfig:
    """The user's own rules.

    layer_specs        the first that matches a weight decides.
    use_default_specs  with a preset: its specs stand after these. If false, the preset is not used.
    strict_mode        a linear, embedding or experts weight that no spec matches is an error.
    lm_head_patterns   parts of names that tell which linear layers are output heads.
    tp_size            only checked against the ranks that there are.
    """

    layer_specs: tuple[LayerSpec, ...] = ()
    use_default_specs: bool = True
    strict_mode: bool = False
    lm_head_patterns: tuple[str, ...] = ("lm_head", "embed_out")
    tp_size: int | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PartitionConfig:
        """The config that a JSON object describes. Raises RuleError with all of its faults."""
        if not isinstance(data, Mapping):
            raise RuleError([f"partition_config must be an object with the key 'layer_specs', got {data!r}"])
        known = [*(field.name for field in fields(cls)), "embedding_partition_dim"]
        problems = [f"partition_config: {problem}" for problem in unknown_keys(data, known)]
        for key in ("use_default_specs", "strict_mode"):
            if not isinstance(data.get(key, False), bool):
                problems.append(f"partition_config: '{key}' must be true or false, got {data[key]!r}")
        if data.get("embedding_partition_dim", 1) != 1:
            problems.append(
                f"partition_config: embedding_partition_dim {data['embedding_partition_dim']!r} is not supported. "
                "To cut an embedding by its vocabulary, name it in a layer spec with partition_type 'vocab'"
            )
        tp_size = data.get("tp_size")
        if tp_size is not None and (not _is_int(tp_size) or tp_size < 1):
            problems.append(f"partition_config: tp_size must be a positive whole number, got {tp_size!r}")
        heads = data.get("lm_head_patterns", cls.lm_head_patterns)
        if (
            isinstance(heads, str)
            or not isinstance(heads, Sequence)
            or not all(isinstance(each, str) for each in heads)
        ):
            problems.append(f"partition_config: lm_head_patterns must be a list of names, got {heads!r}")
            heads = ()
        raw = data.get("layer_specs", ())
        if isinstance(raw, str) or not isinstance(raw, Sequence):
            problems.append(f"partition_config: layer_specs must be a list, got {raw!r}")
            raw = ()
        specs = []
        for index, each in enumerate(raw):
            try:
                specs.append(LayerSpec.from_dict(each))
            except RuleError as error:
                problems += [f"layer_specs[{index}]: {problem}" for problem in error.problems]
        if problems:
            raise RuleError(problems)
        return cls(
            tuple(specs), data.get("use_default_specs", True), data.get("strict_mode", False), tuple(heads), tp_size
        )


def unknown_keys(data: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    """One problem for each key of `data` that is not known, with the nearest known one."""
    names = list(known)
    return [
        f"unknown key {key!r}{near(str(key), names)}: the keys are {_listed(names)}" for key in data if key not in names
    ]


def near(name: str, known: Iterable[str]) -> str:
    """ " (did you mean ...?)" with the known names nearest to `name`, or an empty text."""
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, (list, tuple)) else value
