"""Qwen, the first: fused biased QKV, an MLP spelt its own way, NTK by powers of two, log-n scaling of queries."""

from phalanx.models.qwen.container import QwenLayer, QwenOuter
from phalanx.models.qwen.model import QwenModel
from phalanx.models.qwen.policy import QwenPolicy

__all__ = ["QwenLayer", "QwenModel", "QwenOuter", "QwenPolicy"]
