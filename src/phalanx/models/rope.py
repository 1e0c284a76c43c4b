"""Rotary position frequencies: every kind that configs name, evaluated for each token.

Formulas follow the papers and transformers' ``modeling_rope_utils``: linear (kaiokendev), dynamic NTK (bloc97,
emozilla), YaRN (arXiv:2309.00071), LongRoPE (arXiv:2402.13753), Llama 3.1 (its model card).

A token's frequencies may depend on a length (dynamic, longrope). That length belongs to the token, not to the step: a
prompt's tokens take the prompt's length, a generated token its own position + 1. Chunking, preemption and batch mates
therefore never change a result, and the result is transformers' own for a prompt in one forward and a token at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from phalanx.models.hf_config import HFConfig, ModelConfigError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RopeSettings:
    """What a config says of rope, in one spelling.

    Attributes:
        kind: one of KINDS.
        theta: base of the frequencies.
        rotary_dim: leading elements of a head that are rotated (all, unless rotary is partial); even.
        max_positions: ``max_position_embeddings``.
        original_max_positions: length that the model was first trained at.
        parameters: the remaining numbers of the kind.
    """

    kind: str
    theta: float
    rotary_dim: int
    max_positions: int
    original_max_positions: int
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def length_dependent(self) -> bool:
        return self.kind in ("dynamic", "longrope")

    def regime(self, length: int) -> int:
        """A number that is equal for two lengths exactly if their frequencies are."""
        if self.kind == "longrope":
            return int(length > self.original_max_positions)
        if self.kind == "dynamic":
            return length if length > self.max_positions else 0
        return 0


def rope_settings(
    config: HFConfig,
    head_dim: int,
    *,
    layer_type: str | None = None,
    theta_key: str = "rope_theta",
    partial_key: str = "partial_rotary_factor",
    default_theta: float = 10000.0,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> RopeSettings:
    """Rope of a config: ``rope_parameters`` (new), or ``rope_theta`` with ``rope_scaling`` (old; ``type`` too).

    Args:
        layer_type: the layers that it is for, where a config may tell them apart (``rope_parameters`` by layer type).
            An old ``rope_scaling`` is for "full_attention" only.
        theta_key, partial_key: what this config's old spelling calls ``rope_theta`` and ``partial_rotary_factor``.
        default_theta: theta where the config says none.
        aliases: kinds that this config names otherwise -> one of KINDS.

    Raises:
        ModelConfigError: an unknown kind, a missing or impossible number, two spellings that disagree.
    """
    given = config.given
    values = _one_spelling(given) if layer_type is None else _of_layers(given, layer_type)
    kind = values.pop("rope_type", None) or values.pop("type", None) or "default"
    values.pop("type", None)
    kind = aliases.get(kind, kind)
    if any(isinstance(value, Mapping) for value in values.values()):
        raise ModelConfigError(f"rope parameters per layer type ({', '.join(values)}) are not supported by this model")
    if kind not in KINDS:
        raise ModelConfigError(f"rope type {kind!r} is unknown: supported are {', '.join(KINDS)}")
    theta = values.pop("rope_theta", None) or config.get(theta_key) or config.get("rope_theta") or default_theta
    part = values.pop("partial_rotary_factor", None) or config.get(partial_key) or config.get("partial_rotary_factor")
    partial = part or 1.0
    rotary_dim = int(head_dim * _positive("partial_rotary_factor", partial))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelConfigError(f"rope over {rotary_dim} of {head_dim} elements: an even, positive part is needed")
    max_positions = config.integer("max_position_embeddings")
    inside = values.pop("original_max_position_embeddings", None)
    # Phi-3 writes the original length beside rope_scaling, others inside; llama3 and yarn default to the maximum.
    original = config.get("original_max_position_embeddings") or inside or max_positions
    original = int(_positive("original_max_position_embeddings", original))
    settings = RopeSettings(kind, _positive("rope_theta", theta), rotary_dim, max_positions, original, values)
    _check(settings)
    return settings


def _one_spelling(given: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` and ``rope_scaling`` as one; a config may carry both, if they say the same."""
    merged: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = given.get(name) or {}
        if not isinstance(value, Mapping):
            raise ModelConfigError(f"the config says {name}={value!r}: expected an object")
        differing = [key for key in value if key in merged and merged[key] != value[key]]
        if differing:
            raise ModelConfigError(f"rope_parameters and rope_scaling disagree about {', '.join(differing)}: keep one")
        merged.update(value)
    return merged


def _of_layers(given: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    """The parameters for the layers of one type."""
    by_type = given.get("rope_parameters") or {}
    if isinstance(by_type, Mapping) and any(isinstance(value, Mapping) for value in by_type.values()):
        return dict(by_type.get(layer_type) or {})
    return _one_spelling(given) if layer_type == "full_attention" else {}


REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
LISTS = ("short_factor", "long_factor")
NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow")


def _check(rope: RopeSettings) -> None:
    values = rope.parameters
    for name in REQUIRED[rope.kind]:
        if values.get(name) is None:
            raise ModelConfigError(f"rope type {rope.kind!r} needs `{name}`; given: {dict(values)}")
    for name in NUMBERS:
        if values.get(name) is not None:
            _positive(name, values[name])
    if values.get("factor") is not None and values["factor"] < 1:
        raise ModelConfigError(f"rope `factor` must be at least 1, given {values['factor']!r}")
    if rope.kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise ModelConfigError(
            f"rope `low_freq_factor` ({values['low_freq_factor']}) must be below `high_freq_factor` "
            f"({values['high_freq_factor']})"
        )
    if rope.kind == "dynamic" and rope.rotary_dim < 4:
        raise ModelConfigError(f"rope type 'dynamic' stretches over 4 elements at least, here it has {rope.rotary_dim}")
    expected = rope.rotary_dim // 2
    for name in LISTS if rope.kind == "longrope" else ():
        if not isinstance(values[name], list) or len(values[name]) != expected:
            count = f"{len(values[name])} numbers" if isinstance(values[name], list) else repr(values[name])
            raise ModelConfigError(f"rope `{name}` has {count}, expected a list of rotary_dim / 2 = {expected}")
        for number in values[name]:
            _positive(name, number)


def _positive(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelConfigError(f"rope `{name}` must be a positive number, given {value!r}")
    return float(value)


class RotaryEmbedding:
    """Cosines and sines of one kind of rope, on one device.

    Args:
        settings: the config's rope.
        device: where the angles are computed; always in float32, as transformers does.
    """

    def __init__(self, settings: RopeSettings, device: torch.device) -> None:
        self.settings = settings
        exponents = torch.arange(0, settings.rotary_dim, 2, dtype=torch.float32, device=device) / settings.rotary_dim
        self._exponents = exponents
        self._plain = 1.0 / (settings.theta**exponents)
        self.attention_factor = 1.0
        values = settings.parameters
        if settings.kind == "linear":
            self._plain = self._plain / values["factor"]
        elif settings.kind == "llama3":
            self._plain = _llama3(self._plain, settings)
        elif settings.kind == "yarn":
            self._plain = _yarn(self._plain, settings)
            self.attention_factor = _yarn_attention_factor(values)
        elif settings.kind == "longrope":
            self.attention_factor = _longrope_attention_factor(settings)
            scaled = settings.theta**exponents
            self._plain = 1.0 / (torch.tensor(values["short_factor"], dtype=torch.float32, device=device) * scaled)
            self._long = 1.0 / (torch.tensor(values["long_factor"], dtype=torch.float32, device=device) * scaled)

    def inverse_frequencies(self, rope_lens: Tensor) -> Tensor:
        """float32 [rotary_dim / 2], or [T, rotary_dim / 2] where it depends on ``rope_lens`` (int64 [T])."""
        settings = self.settings
        if settings.kind == "longrope":
            long = (rope_lens > settings.original_max_positions)[:, None]
            return torch.where(long, self._long, self._plain)
        if settings.kind == "dynamic":
            factor, dim = settings.parameters["factor"], settings.rotary_dim
            lengths = rope_lens.clamp_min(settings.max_positions).to(torch.float32)
            stretch = factor * lengths / settings.max_positions - (factor - 1)
            base = settings.theta * stretch ** (dim / (dim - 2))
            return torch.reciprocal(base[:, None] ** self._exponents)
        return self._plain

    def cos_sin(self, positions: Tensor, rope_lens: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of every token, float32 [T, rotary_dim / 2] each; positions and rope_lens int64 [T]."""
        angles = positions.to(torch.float32)[:, None] * self.inverse_frequencies(rope_lens)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos, sin


def _llama3(inv_freq: Tensor, rope: RopeSettings) -> Tensor:
    """Long wavelengths divided by ``factor``, short ones kept, a linear blend between."""
    values, original = rope.parameters, rope.original_max_positions
    low, high, factor = values["low_freq_factor"], values["high_freq_factor"], values["factor"]
    wavelength = 2 * math.pi / inv_freq
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * inv_freq / factor + blend * inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, scaled)


def _yarn(inv_freq: Tensor, rope: RopeSettings) -> Tensor:
    """Frequencies that turn less than ``beta_slow`` times over the original length are interpolated, those that turn
    more than ``beta_fast`` times kept, with a ramp over the dimensions between."""
    values, dim, original = rope.parameters, rope.rotary_dim, rope.original_max_positions

    def dimension_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = dimension_of(values.get("beta_fast") or 32)
    last = dimension_of(values.get("beta_slow") or 1)
    if values.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    steps = torch.arange(dim // 2, dtype=torch.float32, device=inv_freq.device)
    interpolated = ((steps - first) / (last - first)).clamp(0, 1)
    scaled: Tensor = inv_freq / values["factor"]
    return scaled * interpolated + inv_freq * (1 - interpolated)


def _yarn_attention_factor(values: Mapping[str, Any]) -> float:
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])

    def magnitude(scale: float, mscale: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    factor = values["factor"]
    if values.get("mscale") and values.get("mscale_all_dim"):
        return magnitude(factor, values["mscale"]) / magnitude(factor, values["mscale_all_dim"])
    return magnitude(factor)


def _longrope_attention_factor(rope: RopeSettings) -> float:
    values = rope.parameters
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])
    factor = values.get("factor") or rope.max_positions / rope.original_max_positions
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(rope.original_max_positions))
