"""Real models by their published configs, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from phalanx.parallel.plan import hollow_model

FOLDER = Path(__file__).parents[2] / "examples" / "configs"
# Parameters as published; Falcon's head is tied, and counts once (the hub counts both: 7.22 and 41.84 billion).
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "pythia-6.9b": 6_857_302_016,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "phi-4": 14_659_507_200,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-32b": 32_762_123_264,
}


def hollow(name: str) -> Any:
    return hollow_model(AutoConfig.from_pretrained(FOLDER / name))
