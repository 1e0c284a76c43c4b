"""build_engine: from a model's name to an engine that runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.config import EngineConfig, engine_config
from phalanx.distributed.group import Group
from phalanx.engine.inference_engine import InferenceEngine
from phalanx.engine.opened_model import OpenedModel
from phalanx.engine.ranks import Team, assemble

LOADING_TIMEOUT = 3600.0
"""Seconds that a rank waits for the others to load."""


def build_engine(
    model: Any,
    config: EngineConfig | dict[str, Any] | None = None,
    *,
    hf_config: Mapping[str, Any] | None = None,
    group: Group | None = None,
    **overrides: Any,
) -> InferenceEngine:
    """An InferenceEngine for users with a scheduler of their own.

    Args:
        model: a folder (Hugging Face or serialised), GGUF file, hub id, ``nn.Module``, mapping or WeightSource.
        config, overrides: settings of EngineConfig.
        hf_config: the model's config, for sources that carry none.
        group: ranks that the user has brought together; every rank makes the same calls then.

    Raises:
        ConfigError, ModelConfigError, WeightError: bad settings, an unsupported model, unusable weights; all by name.
    """
    settings = engine_config(config, **overrides)
    opened = OpenedModel(model, hf_config)
    return assemble_engine(opened, settings, group, scheduled=False)[0]


def assemble_engine(
    opened: OpenedModel, config: EngineConfig, group: Group | None, scheduled: bool
) -> tuple[InferenceEngine, Team]:
    """The engine of this rank, with its team; on failure the ranks that were started are ended."""
    path = opened.spec()
    spec = None
    if path is not None:
        spec = {
            "model": path,
            "config": config.model_dump(exclude_unset=True),
            "hf_config": dict(opened.config.given),
            "scheduled": scheduled,
        }
    team = assemble(config, spec, group)
    try:
        return engine_of_rank(opened, config, team, scheduled), team
    except BaseException:
        team.group.abort("the engine could not be built")
        team.close()
        raise


def engine_of_rank(opened: OpenedModel, config: EngineConfig, team: Team, scheduled: bool) -> InferenceEngine:
    """The engine of one rank; every rank of the team builds its own at the same time."""
    model, policy_name = opened.build(config, team.group)
    # Ranks may load at different speed; only what follows is held to the time of a collective.
    team.group.barrier(timeout=LOADING_TIMEOUT)
    return InferenceEngine(model, team, policy_name, scheduled)
