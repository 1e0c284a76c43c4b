"""Every hook that a model may override, overridden once: what it changes is what the same change to transformers'
weights or config makes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.config import EngineConfig
from phalanx.distributed.group import SoloGroup
from phalanx.engine.build import build_engine
from phalanx.engine.inference_engine import SchedulingError
from phalanx.models import HFConfig, LayerContainer, TransformerModel
from phalanx.models.base import StepState
from phalanx.models.kv_spec import KVCacheSpec
from phalanx.models.layers import Attention, Embedding, Linear, Norm, Unembedding
from phalanx.models.llama import LlamaLayer, LlamaPolicy
from phalanx.models.parameters import InvFreqParameter, NormParameter
from phalanx.ops.batch import RaggedBatch
from tests.models.tiny import error, llama, llama_config, reference

IDS = list(range(5, 25))


class DoubledLinear(Linear):
    def __call__(self, *args: Any) -> Tensor:
        return 2 * super().__call__(*args)


class DoubledEmbedding(Embedding):
    def __call__(self, *args: Any) -> Tensor:
        return 2 * super().__call__(*args)


class DoubledUnembedding(Unembedding):
    def __call__(self, *args: Any) -> Tensor:
        return 2 * super().__call__(*args)


def doubled(layer: Linear) -> Linear:
    return DoubledLinear(layer.placement, layer.partition, layer.in_features, layer.out_features)


class NormLayer(TransformerModel):
    def make_norm_layer(self) -> Norm:
        return Norm(self.placement, "rms_norm", 0.5)


class QKVLayer(TransformerModel):
    def make_qkv_layer(self) -> Linear:
        return doubled(super().make_qkv_layer())


class AttnLayer(TransformerModel):
    def make_attn_layer(self, layer: int) -> Attention:
        made = super().make_attn_layer(layer)
        made.scale *= 2 if layer == 1 else 1
        return made


class AttnOutLayer(TransformerModel):
    def make_attn_out_layer(self) -> Linear:
        return doubled(super().make_attn_out_layer())


class MLP1Layer(TransformerModel):
    def make_mlp_1_layer(self) -> Linear:
        return doubled(super().make_mlp_1_layer())


class MLP2Layer(TransformerModel):
    def make_mlp_2_layer(self) -> Linear:
        return doubled(super().make_mlp_2_layer())


class EmbeddingLayer(TransformerModel):
    def make_embedding_layer(self) -> Embedding:
        return DoubledEmbedding(self.placement, self.vocab_size, self.hidden_size, self.tied_head)


class UnembeddingLayer(TransformerModel):
    def make_unembedding_layer(self) -> Unembedding:
        return DoubledUnembedding(self.placement, self.vocab_size, self.hidden_size)


class PrepareBatch(TransformerModel):
    def prepare_batch(self, batch: RaggedBatch) -> StepState:
        return super().prepare_batch(replace(batch, positions=3 * batch.positions))


class ForwardEmbed(TransformerModel):
    def forward_embed(self, batch: RaggedBatch) -> Tensor:
        return 2 * super().forward_embed(batch)


class ForwardLayer(TransformerModel):
    def forward_layer(
        self, layer: int, hidden: Tensor, residual: Tensor | None, state: StepState
    ) -> tuple[Tensor, Tensor | None]:
        return (hidden, residual) if layer == 1 else super().forward_layer(layer, hidden, residual, state)


class ForwardAttention(TransformerModel):
    def forward_attention(self, layer: int, hidden: Tensor, state: StepState) -> Tensor:
        return 2 * super().forward_attention(layer, hidden, state)


class ForwardMLP(TransformerModel):
    def forward_mlp(self, layer: int, hidden: Tensor) -> Tensor:
        return 2 * super().forward_mlp(layer, hidden)


class ForwardUnembed(TransformerModel):
    def forward_unembed(self, hidden: Tensor, residual: Tensor | None, batch: RaggedBatch) -> Tensor:
        return 2 * super().forward_unembed(hidden, residual, batch)


class TransformNorm(TransformerModel):
    def transform_norm_param(self, value: Any) -> Any:
        return super().transform_norm_param(2 * value.load())


def scaled(*parts: str, factor: float = 2.0, layer: str = "") -> Callable[[Any], None]:
    """Multiplies all weights whose name has one of the parts."""

    def change(module: Any) -> None:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if any(part in name for part in parts) and layer in name:
                    parameter *= factor

    return change


def only_first_layer(module: Any) -> None:
    module.model.layers = module.model.layers[:1]


def larger_eps(module: Any) -> None:
    for part in module.modules():
        if hasattr(part, "variance_epsilon"):
            part.variance_epsilon = 0.5


def faster_rope(module: Any) -> None:
    module.model.rotary_emb.inv_freq *= 3


CHANGES: dict[type[TransformerModel], Callable[[Any], None]] = {
    NormLayer: larger_eps,
    QKVLayer: scaled("q_proj", "k_proj", "v_proj"),
    AttnLayer: scaled("q_proj", layer="layers.1."),
    AttnOutLayer: scaled("o_proj"),
    MLP1Layer: scaled("gate_proj", "up_proj"),
    MLP2Layer: scaled("down_proj"),
    EmbeddingLayer: scaled("embed_tokens"),
    UnembeddingLayer: scaled("lm_head"),
    PrepareBatch: faster_rope,
    ForwardEmbed: scaled("embed_tokens"),
    ForwardLayer: only_first_layer,
    ForwardAttention: scaled("o_proj"),
    ForwardMLP: scaled("down_proj"),
    ForwardUnembed: scaled("lm_head"),
    TransformNorm: scaled("norm"),
}


def engine_of(model_class: type[TransformerModel], policies: dict[str, Any], module: Any, **settings: Any) -> Any:
    """An engine of a tiny Llama that is served by this model class."""
    policies["llama"] = type("Hooked", (LlamaPolicy,), {"model_class": model_class})
    return build_engine(module, **{"num_blocks": 8, "block_size": 8, **settings})


@pytest.mark.parametrize("kind", CHANGES, ids=lambda kind: kind.__name__)
def test_steps_and_modules(kind: type[TransformerModel], policies: dict[str, Any], tiny_llama: Any) -> None:
    plain = reference(tiny_llama, IDS, [len(IDS)])
    changed = copy.deepcopy(tiny_llama)
    CHANGES[kind](changed)
    expected = reference(changed, IDS, [len(IDS)])
    assert error(plain, expected) > 1e-3
    engine = engine_of(kind, policies, tiny_llama)
    found = torch.cat([engine.put([0], [ids], logits="all") for ids in (IDS[:11], IDS[11:12], IDS[12:])])
    assert error(found, expected) < 1e-4


def test_kv_cache_spec(policies: dict[str, Any], tiny_llama: Any) -> None:
    class Windowed(TransformerModel):
        def kv_cache_spec(self, layer: int) -> KVCacheSpec:
            return replace(super().kv_cache_spec(layer), window=64 if layer == 1 else None)

    engine = engine_of(Windowed, policies, tiny_llama)
    assert [(group.spec.window, group.layers) for group in engine.model.kv_groups] == [(None, (0,)), (64, (1,))]
    assert engine.model.kv_group_of == {0: 0, 1: 1} and engine.free_blocks == 3  # of 7, shared by two groups
    found = engine.put([0], [IDS], logits="all")
    assert error(found, reference(tiny_llama, IDS, [len(IDS)])) < 1e-4


def test_get_kv_requirements(policies: dict[str, Any], tiny_llama: Any) -> None:
    class OneMore(TransformerModel):
        def get_kv_requirements(self, sequence: Any, max_new_tokens: int, max_new_blocks: int) -> tuple[int, int]:
            tokens, blocks = super().get_kv_requirements(sequence, max_new_tokens, max_new_blocks - 1)
            return tokens, blocks + (tokens > 0)

    engine = engine_of(OneMore, policies, tiny_llama)
    assert engine.query(0, 100, 7) == (32, 5)
    engine.put([0], [IDS])
    assert engine.free_blocks == 3  # 3 hold the tokens, one more is kept


def test_maybe_allocate_kv(policies: dict[str, Any], tiny_llama: Any) -> None:
    asked: list[int] = []

    class Miserly(TransformerModel):
        def maybe_allocate_kv(self, sequence: Any, num_new_tokens: int, blocks: Any) -> bool:
            asked.append(num_new_tokens)
            return len(asked) != 3 and super().maybe_allocate_kv(sequence, num_new_tokens, blocks)

    engine = engine_of(Miserly, policies, tiny_llama)
    first = engine.put([0], [IDS])
    before = (engine.free_blocks, engine.tracked_sequences)
    with pytest.raises(SchedulingError, match="KVCacheLimitExceeded: uid 1"):
        engine.put([0, 1], [IDS[:1], IDS])
    assert (engine.free_blocks, engine.tracked_sequences) == before
    assert torch.equal(engine.put([2], [IDS]), first) and asked == [20, 1, 20, 20]


def test_inverse_frequencies_from_the_checkpoint(policies: dict[str, Any], tiny_llama: Any) -> None:
    class Layer(LlamaLayer):
        inv_freq: InvFreqParameter
        PARAM_MAPPING = {"self_attn.rotary_emb.inv_freq": "inv_freq.params"}

    class Stored(TransformerModel):
        @property
        def layer_parameters(self) -> frozenset[str]:
            return super().layer_parameters | {"inv_freq"}

        def prepare_batch(self, batch: RaggedBatch) -> StepState:
            angles = batch.positions[:, None].float() * self.layers[0].inv_freq.data
            return StepState(batch, [(angles.cos(), angles.sin())] * self.num_layers)

    changed = copy.deepcopy(tiny_llama)
    faster_rope(changed)
    inv_freq = changed.model.rotary_emb.inv_freq
    stored = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": inv_freq for layer in (0, 1)}
    parts = {"model_class": Stored, "layer_container": Layer, "unmapped": ()}
    policies["llama"] = type("WithStored", (LlamaPolicy,), parts)
    weights = {**tiny_llama.state_dict(), **stored}
    engine = build_engine(weights, hf_config=llama_config().to_dict(), num_blocks=8, block_size=8)
    assert error(engine.put([0], [IDS], logits="all"), reference(changed, IDS, [len(IDS)])) < 1e-4


@pytest.mark.parametrize("layers", [1, 3])
def test_containers_may_differ_from_layer_to_layer(layers: int, policies: dict[str, Any]) -> None:
    class Odd(LlamaLayer):
        PARAM_MAPPING = {"mlp.down_proj.weight": None, "mlp.out.weight": "mlp_2.params"}

    class Mixed(LlamaPolicy):
        def make_layer_container(self, model: TransformerModel, layer: int) -> LlamaLayer:
            return (Odd if layer % 2 else LlamaLayer)(model)

    policies["llama"] = Mixed
    module = llama(llama_config(num_hidden_layers=layers))
    tensors = module.state_dict().items()
    weights = {name.replace("layers.1.mlp.down_proj", "layers.1.mlp.out"): tensor for name, tensor in tensors}
    engine = build_engine(weights, hf_config=module.config.to_dict(), num_blocks=8, block_size=8)
    assert error(engine.put([0], [IDS], logits="all"), reference(module, IDS, [len(IDS)])) < 1e-4


def test_an_offset_of_norms_is_not_added_to_their_biases() -> None:
    """The norm of Nemotron: LayerNorm with weights stored as an offset from 1, and biases as they are."""

    class Offset(TransformerModel):
        norm_type = "layer_norm"
        norm_offset = 1.0
        norm_eps = 1e-5

    class Norms(LayerContainer):
        attn_norm: NormParameter
        attn_norm_bias: NormParameter

        PARAM_MAPPING = {"norm.weight": "attn_norm.params", "norm.bias": "attn_norm_bias.params"}

    model = Offset(HFConfig(llama_config().to_dict()), EngineConfig(device="cpu", dtype="float32"), SoloGroup())
    norms: Any = Norms(model)
    for name in ("norm.weight", "norm.bias"):
        norms.set_dependency(name, torch.full((model.hidden_size,), 0.5))
    assert bool((norms.attn_norm.data == 1.5).all())
    assert bool((norms.attn_norm_bias.data == 0.5).all())
