"""The common Parameters: how checkpoints usually spell the tensors of a Transformer."""

from phalanx.models.parameters.attention import (
    AttentionOutputBiasParameter,
    AttentionOutputParameter,
    FusedQKVParameter,
    GQAMegatronQKVParameter,
    MegatronQKVParameter,
    UnfusedQKVBiasParameter,
    UnfusedQKVParameter,
)
from phalanx.models.parameters.embedding import EmbeddingParameter, UnembedParameter
from phalanx.models.parameters.mlp import (
    FusedGatedMLPParameter,
    GatedMLPBiasParameter,
    GatedMLPParameter,
    MLP1Parameter,
    MLP2BiasParameter,
    MLP2Parameter,
)
from phalanx.models.parameters.norm import NormParameter

__all__ = [
    "AttentionOutputBiasParameter",
    "AttentionOutputParameter",
    "EmbeddingParameter",
    "FusedGatedMLPParameter",
    "FusedQKVParameter",
    "GQAMegatronQKVParameter",
    "GatedMLPBiasParameter",
    "GatedMLPParameter",
    "MLP1Parameter",
    "MLP2BiasParameter",
    "MLP2Parameter",
    "MegatronQKVParameter",
    "NormParameter",
    "UnembedParameter",
    "UnfusedQKVBiasParameter",
    "UnfusedQKVParameter",
]
