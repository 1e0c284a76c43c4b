"""MoETransformerModel: a model whose MLPs, in all layers or in some, are mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from phalanx.config import EngineConfig
from phalanx.distributed.group import Group
from phalanx.layout.partition import Block, Partition
from phalanx.models.base import TransformerModel
from phalanx.models.container import LayerContainer
from phalanx.models.experts import Experts
from phalanx.models.hf_config import HFConfig, ModelConfigError
from phalanx.models.layers import Linear, as_prepared, prepared
from phalanx.models.parameter import DeclarationError, InferenceParameter
from phalanx.models.policy import InferencePolicy
from phalanx.ops.linear import linear
from phalanx.weights import WeightError

MOE_PARAMETERS = frozenset({"moe_gate", "moe_mlp_1", "moe_mlp_2"})
"""The parameters of a layer of experts, in place of ``mlp_1`` and ``mlp_2``."""

SHARED_PARAMETERS = frozenset({"shared_gate", "shared_mlp_1", "shared_mlp_2"})
"""The same of its shared expert."""


class MoETransformerModel(TransformerModel):
    """A TransformerModel with experts; see TransformerModel for arguments and errors."""

    def __init__(self, config: HFConfig, engine_config: EngineConfig, group: Group) -> None:
        super().__init__(config, engine_config, group)
        self.moe = self.make_moe_layer()
        self.shared_mlp_1 = self.make_shared_mlp_1_layer()
        self.shared_mlp_2 = self.make_shared_mlp_2_layer()

    # -- traits

    @property
    def num_experts(self) -> int:
        """Experts of a layer that has any. Both names of it are in use, and a file has but one of them."""
        names = ("num_experts", "num_local_experts")
        # What the file says goes before a default under the other name.
        found = [name for values in (self.config.given, self.config) for name in names if name in values]
        return self.config.integer(found[0] if found else names[0])

    @property
    def experts_per_token(self) -> int:
        return self.config.integer("num_experts_per_tok")

    @property
    def normalize_expert_weights(self) -> bool:
        """Whether the weights of a token's experts, out of a softmax over all, are divided by their sum."""
        return self.config.boolean("norm_topk_prob")

    @property
    def expert_intermediate_size(self) -> int:
        """Inner width of an expert; ``intermediate_size`` is that of the dense layers."""
        return self.config.integer("moe_intermediate_size")

    @property
    def shared_expert_size(self) -> int:
        """Inner width of an expert that every token goes to, weighted by a sigmoid gate; 0 for none."""
        return 0

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer has experts rather than one MLP."""
        if self.num_experts == 0 or layer in (self.config.get("mlp_only_layers") or ()):
            return False
        return (layer + 1) % self.sparse_step == 0

    @cached_property
    def moe_layers(self) -> frozenset[int]:
        """The layers with experts."""
        return frozenset(layer for layer in range(self.num_layers) if self.is_moe_layer(layer))

    @property
    def sparse_step(self) -> int:
        """Every so many layers there is one with experts."""
        return 1 if self.config.get("decoder_sparse_step") is None else self.config.integer("decoder_sparse_step")

    @property
    def layer_parameters(self) -> frozenset[str]:
        shared = SHARED_PARAMETERS if self.shared_expert_size else frozenset()
        return super().layer_parameters | MOE_PARAMETERS | shared

    def check_traits(self) -> None:
        super().check_traits()
        dense = self.config.get("mlp_only_layers")
        if dense is not None and not (isinstance(dense, list) and all(isinstance(layer, int) for layer in dense)):
            raise ModelConfigError(f"the config says mlp_only_layers={dense!r}: expected a list of layers")
        if self.sparse_step < 1:
            raise ModelConfigError(f"decoder_sparse_step is {self.sparse_step}: expected at least 1")
        if self.num_experts < 0 or self.shared_expert_size < 0:
            raise ModelConfigError(
                f"{self.num_experts} experts, a shared one of width {self.shared_expert_size}: neither may be negative"
            )
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ModelConfigError(f"a token cannot go to {self.experts_per_token} of {self.num_experts} experts")
        if self.num_experts and self.expert_intermediate_size < 1:
            raise ModelConfigError(f"experts have a width of {self.expert_intermediate_size}: expected at least 1")

    # -- hooks: the modules

    def make_moe_layer(self) -> Experts:
        """Router and experts. Of the shared expert see ``make_shared_mlp_1_layer`` and its sibling."""
        return Experts(
            self.placement,
            self.num_experts,
            self.experts_per_token,
            self.normalize_expert_weights,
            self.hidden_size,
            self.expert_intermediate_size,
            self.gated_mlp,
            partial(self.activate, name=self.activation),
        )

    def make_shared_mlp_1_layer(self) -> Linear:
        """Fused [gate; up] of a gated shared expert, else its up projection."""
        blocks = (Block(self.shared_expert_size),) * (2 if self.gated_mlp else 1)
        return Linear(self.placement, Partition.column(blocks), self.hidden_size, sum(b.size for b in blocks))

    def make_shared_mlp_2_layer(self) -> Linear:
        block = Block(self.shared_expert_size)
        return Linear(self.placement, Partition.row((block,)), block.size, self.hidden_size)

    # -- hooks: from checkpoint tensors to served ones

    def transform_moe_gate_param(self, value: Any) -> InferenceParameter | None:
        """The router's weight [experts, hidden]."""
        return self.moe.transform_gate(value)

    def transform_moe_mlp_1_param(self, value: Any) -> InferenceParameter | None:
        """The experts' [gate; up] or up projections: one tensor [experts, out, hidden], or for each expert a tensor
        [out, hidden] or its parts."""
        return self.moe.transform_first(value)

    def transform_moe_mlp_2_param(self, value: Any) -> InferenceParameter | None:
        """The experts' down projections: one tensor [experts, hidden, in], or [hidden, in] for each expert."""
        return self.moe.transform_second(value)

    def transform_shared_gate_param(self, value: Any) -> InferenceParameter | None:
        """The weight [1, hidden] of the shared expert's gate, whole on every rank."""
        return prepared(self.placement.cut(value, Partition.replicate()), self.placement)

    def transform_shared_mlp_1_param(self, value: Any) -> InferenceParameter | None:
        """Like ``transform_mlp_1_param``, for the shared expert."""
        return self.shared_mlp_1.transform(value)

    def transform_shared_mlp_2_param(self, value: Any) -> InferenceParameter | None:
        return self.shared_mlp_2.transform(value)

    def set_parameters(self, transformer: Sequence[LayerContainer], non_transformer: LayerContainer | None) -> None:
        """Takes the filled containers.

        Raises:
            DeclarationError: as the base does; also where a layer of experts has a dense container or the reverse.
        """
        for layer, container in enumerate(transformer):
            if (layer in self.moe_layers) != ("moe_gate" in container.parameters):
                kind = "has experts" if layer in self.moe_layers else "has no experts"
                raise DeclarationError(
                    f"layer {layer} {kind}, its container {type(container).__name__} says otherwise: correct "
                    "is_moe_layer() or the policy's make_layer_container()"
                )
        super().set_parameters(transformer, non_transformer)

    # -- the forward

    def forward_mlp(self, layer: int, hidden: Tensor) -> Tensor:
        if layer not in self.moe_layers:
            return super().forward_mlp(layer, hidden)
        parameters = self.layers[layer]
        out = self.moe(hidden, parameters.moe_gate, parameters.moe_mlp_1, parameters.moe_mlp_2)
        if self.shared_expert_size:
            out = out + self.forward_shared_expert(layer, hidden)
        return self.group.all_reduce(out) if self.group.size > 1 else out

    def forward_shared_expert(self, layer: int, hidden: Tensor) -> Tensor:
        """hidden [T, hidden] -> [T, hidden] of this rank, to be added up over the ranks."""
        parameters = self.layers[layer]
        inner = self.activate(self.shared_mlp_1(hidden, parameters.shared_mlp_1), self.activation)
        share = torch.sigmoid(linear(hidden, as_prepared(parameters.shared_gate)))
        return share * linear(inner, as_prepared(parameters.shared_mlp_2))


class MoEPolicy(InferencePolicy):
    """Assembles a model with experts, dense layers between them included.

    Attributes:
        layer_container: of the dense layers.
        moe_container: of layers whose experts have a tensor each.
        fused_container: of layers whose experts share tensors, None where no checkpoint has them so.
    """

    model_class: ClassVar[type[TransformerModel]] = MoETransformerModel
    moe_container: ClassVar[type[LayerContainer]]
    fused_container: ClassVar[type[LayerContainer] | None] = None

    def make_layer_container(self, model: TransformerModel, layer: int) -> LayerContainer:
        """The container that fits the layer, and the names that the checkpoint has for it."""
        if not isinstance(model, MoETransformerModel):
            raise DeclarationError(f"{type(self).__name__} takes a MoETransformerModel, given {type(model).__name__}")
        if not model.is_moe_layer(layer):
            return self.layer_container(model)
        if self.fused_container is not None and self._has_names(self.fused_container, layer):
            return self.fused_container(model)
        return self.moe_container(model)

    def _has_names(self, container: type[LayerContainer], layer: int) -> bool:
        """Whether the source has a name in this layer that only this container knows."""
        own = {rule.source for rule in container.rules} - {rule.source for rule in self.moe_container.rules}
        prefixes = (self.layer_prefix,) if isinstance(self.layer_prefix, str) else self.layer_prefix
        return any(f"{prefix}.{layer}.{name}" in self._source_names for prefix in prefixes for name in own)

    @cached_property
    def _source_names(self) -> frozenset[str]:
        try:
            return frozenset(self.source.names() if self.source is not None else ())
        except WeightError:
            # Files that cannot be listed: reading them says what is wrong, whatever the containers are.
            return frozenset()
