"""GGUF files: weights, config and tokenizer. Needs the extra `phalanx[gguf]`."""

from phalanx.weights.gguf.source import GGUFSource

__all__ = ["GGUFSource"]
