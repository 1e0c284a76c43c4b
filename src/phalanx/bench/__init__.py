"""Measuring: an engine's speed on random prompts, beside that of other engines on the same weights."""

from __future__ import annotations

PEERS: dict[str, tuple[str, ...]] = {
    "transformers": ("padded", "continuous", "single"),
    "vllm": ("compiled", "eager"),
}
"""Every other engine that can be measured, with its modes."""
