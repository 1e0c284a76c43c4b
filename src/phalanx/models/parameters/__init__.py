"""The common Parameters: how checkpoints usually spell the tensors of a Transformer."""

from phalanx.models.parameters.attention import (
    AttentionOutputBiasParameter,
    AttentionOutputParameter,
    FusedQKVBiasParameter,
    FusedQKVParameter,
    GQAMegatronQKVBiasParameter,
    GQAMegatronQKVParameter,
    MegatronQKVParameter,
    UnfusedQKVBiasParameter,
    UnfusedQKVParameter,
)
from phalanx.models.parameters.embedding import (
    EmbeddingParameter,
    InvFreqParameter,
    PositionEmbeddingParameter,
    UnembedBiasParameter,
    UnembedParameter,
)
from phalanx.models.parameters.mlp import (
    FusedGatedMLPParameter,
    GatedMLPBiasParameter,
    GatedMLPParameter,
    MLP1BiasParameter,
    MLP1Parameter,
    MLP2BiasParameter,
    MLP2Parameter,
)
from phalanx.models.parameters.norm import HeadNormParameter, NormParameter

__all__ = [
    "AttentionOutputBiasParameter",
    "AttentionOutputParameter",
    "EmbeddingParameter",
    "FusedGatedMLPParameter",
    "FusedQKVBiasParameter",
    "FusedQKVParameter",
    "GQAMegatronQKVBiasParameter",
    "GQAMegatronQKVParameter",
    "GatedMLPBiasParameter",
    "GatedMLPParameter",
    "HeadNormParameter",
    "InvFreqParameter",
    "MLP1BiasParameter",
    "MLP1Parameter",
    "MLP2BiasParameter",
    "MLP2Parameter",
    "MegatronQKVParameter",
    "NormParameter",
    "PositionEmbeddingParameter",
    "UnembedBiasParameter",
    "UnembedParameter",
    "UnfusedQKVBiasParameter",
    "UnfusedQKVParameter",
]
