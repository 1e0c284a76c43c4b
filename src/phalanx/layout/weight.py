"""What the rules know of a model: the names and shapes of its weights, and the heads of its attention modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WeightKind = Literal["linear", "conv1d", "embedding", "experts", "norm", "other"]


@dataclass(frozen=True)
class AttentionShape:
    """The heads of one attention module. `head_dim` is of queries and keys, `v_head_dim` of values if it differs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None

    @property
    def value_dim(self) -> int:
        """Elements of one value head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim


@dataclass(frozen=True)
class Weight:
    """One parameter of a model that could be cut, under its full dotted name.

    shape      the whole shape as it is stored.
    kind       "linear" [out, in]; "conv1d" (Hugging Face Conv1D) [in, out]; "embedding" [rows, hidden]; "experts", all
               experts of a layer in one tensor [experts, out, in] (or as DBRX has them, [experts x inner, hidden]);
               "norm"; "other".
    has_bias   whether its module has a bias of the output features.
    attention  the heads of the attention module that holds it, None outside of attention.
    """

    name: str
    shape: tuple[int, ...]
    kind: WeightKind
    has_bias: bool = False
    attention: AttentionShape | None = None

    @property
    def out_features(self) -> int:
        """Output features of a linear, conv1d or experts weight."""
        return self.shape[-1] if self.kind == "conv1d" else self.shape[-2]

    @property
    def in_features(self) -> int:
        """Input features of a linear, conv1d or experts weight."""
        return self.shape[-2] if self.kind == "conv1d" else self.shape[-1]

    @property
    def out_dim(self) -> int:
        """The tensor dimension of the output features, such that its bias is cut by the same number if it has one."""
        return {"conv1d": -1, "experts": 1}.get(self.kind, 0)

    @property
    def in_dim(self) -> int:
        """The tensor dimension of the input features, negative from the end."""
        return -2 if self.kind == "conv1d" else -1
