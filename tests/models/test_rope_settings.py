"""Rope as configs say it: both spellings, and every number that is refused by name. The angles are held against
transformers in test_llama.py."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.models import HFConfig, ModelConfigError
from phalanx.models.rope import KINDS, RopeSettings, rope_settings

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def settings(head_dim: int = 8, **values: Any) -> RopeSettings:
    return rope_settings(HFConfig({"model_type": "llama", "max_position_embeddings": 64, **values}), head_dim)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ("default", 10000.0, 8, 64, 64)),
        ({"rope_theta": 5e5}, ("default", 5e5, 8, 64, 64)),
        ({"rope_parameters": {"rope_theta": 5e5}}, ("default", 5e5, 8, 64, 64)),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1.0}, ("default", 5e5, 8, 64, 64)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5}, ("linear", 5e5, 8, 64, 64)),
        ({"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2}}, ("linear", 1e4, 8, 64, 64)),
        ({"rope_scaling": None, "rope_parameters": None}, ("default", 1e4, 8, 64, 64)),
        ({"partial_rotary_factor": 0.5}, ("default", 1e4, 4, 64, 64)),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, ("default", 1e4, 2, 64, 64)),
        ({"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}}, ("llama3", 1e4, 8, 64, 16)),
        ({"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}, ("longrope", 1e4, 8, 64, 32)),
        ({"rope_parameters": LLAMA3, "rope_scaling": LLAMA3}, ("llama3", 1e4, 8, 64, 64)),
    ],
)
def test_spellings(values: dict[str, Any], expected: tuple[Any, ...]) -> None:
    rope = settings(**values)
    found = (rope.kind, rope.theta, rope.rotary_dim, rope.max_positions, rope.original_max_positions)
    assert found == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "sinusoid"}, rf"rope type 'sinusoid' is unknown: supported are {', '.join(KINDS)}"),
    ({"type": "mrope"}, "rope type 'mrope' is unknown"),
    ({"full_attention": {"rope_type": "default"}}, r"per layer type \(full_attention\) are not supported"),
    ({"rope_type": "linear"}, "rope type 'linear' needs `factor`"),
    ({"rope_type": "dynamic", "factor": None}, "rope type 'dynamic' needs `factor`"),
    ({"rope_type": "yarn"}, "rope type 'yarn' needs `factor`"),
    ({"rope_type": "llama3", "factor": 8.0}, "rope type 'llama3' needs `low_freq_factor`"),
    ({"rope_type": "longrope", "short_factor": [1.0] * 4}, "rope type 'longrope' needs `long_factor`"),
    ({"rope_type": "linear", "factor": 0.5}, "rope `factor` must be at least 1, given 0.5"),
    ({"rope_type": "linear", "factor": "4"}, "rope `factor` must be a positive number, given '4'"),
    ({"rope_type": "linear", "factor": True}, "rope `factor` must be a positive number, given True"),
    ({"rope_type": "linear", "factor": float("inf")}, "rope `factor` must be a positive number, given inf"),
    ({"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}, "rope `beta_fast` must be a positive number, given -1"),
    ({**LLAMA3, "low_freq_factor": 4.0}, r"`low_freq_factor` \(4.0\) must be below `high_freq_factor` \(4.0\)"),
    ({**LONGROPE, "long_factor": [1.0]}, "rope `long_factor` has 1 numbers, expected a list of rotary_dim / 2 = 4"),
    ({**LONGROPE, "long_factor": 2.0}, "rope `long_factor` has 2.0, expected a list"),
    ({**LONGROPE, "short_factor": [1.0, 0.0, 1.0, 1.0]}, "rope `short_factor` must be a positive number, given 0.0"),
    ({"rope_theta": "1e4"}, "rope `rope_theta` must be a positive number, given '1e4'"),
    ({"rope_theta": -1.0}, "rope `rope_theta` must be a positive number, given -1.0"),
    ({"partial_rotary_factor": 0.4}, "rope over 3 of 8 elements: an even, positive part is needed"),
    ({"partial_rotary_factor": 0.1}, "rope over 0 of 8 elements"),
    ({"partial_rotary_factor": 2.0}, "rope over 16 of 8 elements"),
    ({"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.25}, "'dynamic' stretches over 4 elements"),
    (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": -4},
        "`original_max_position_embeddings`",
    ),
]


@pytest.mark.parametrize(("rope", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_is_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        settings(rope_parameters=rope)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\]: expected an object"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear': expected an object"),
        (
            {"rope_parameters": {"factor": 2}, "rope_scaling": {"factor": 4}},
            "rope_parameters and rope_scaling disagree about factor",
        ),
        ({"max_position_embeddings": None}, "max_position_embeddings=None: expected a whole number"),
    ],
)
def test_configs_that_make_no_sense(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        settings(**values)


def test_regimes_are_equal_where_frequencies_are() -> None:
    dynamic = settings(rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    long = settings(rope_parameters=LONGROPE, original_max_position_embeddings=32)
    plain = settings()
    assert [dynamic.regime(length) for length in (1, 64, 65, 66)] == [0, 0, 65, 66]
    assert [long.regime(length) for length in (1, 32, 33, 64)] == [0, 0, 1, 1]
    assert plain.regime(1) == plain.regime(10**6) == 0
    assert [rope.length_dependent for rope in (dynamic, long, plain)] == [True, True, False]
