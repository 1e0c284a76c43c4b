"""GenericModel: a module of transformers with the face of a TransformerModel."""

from __future__ import annotations

import inspect
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.config import EngineConfig
from phalanx.distributed.group import Group
from phalanx.layout import kv_heads, query_heads
from phalanx.models.base import TransformerModel
from phalanx.models.generic.attention import NAME, LayerAttention, Notes, Ragged, register
from phalanx.models.hf_config import HFConfig, ModelConfigError
from phalanx.models.kv_spec import KVCacheSpec
from phalanx.models.placement import Placement, device_of
from phalanx.models.rope import RopeSettings
from phalanx.models.traits import Traits
from phalanx.ops.batch import RaggedBatch
from phalanx.parallel.cut import attention_blocks
from phalanx.parallel.parallelize import cut_model, decisions_for
from phalanx.parallel.registry import LayoutRegistry

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class GenericModel(TransformerModel):
    """Serves what `module` computes; built without values, which `load` of its policy brings.

    Raises:
        ModelConfigError: the module asks for something that the engine cannot serve right, by name.
    """

    def __init__(self, config: HFConfig, engine_config: EngineConfig, group: Group) -> None:
        Traits.__init__(self, config)
        self.engine_config = engine_config
        self.group = group
        self.device = device_of(engine_config, group)
        self.dtype = self._dtype()
        for setting in ("quantization", "kv_cache_dtype", "batch_invariant"):
            given = getattr(engine_config, setting)
            if given != EngineConfig.model_fields[setting].default:
                raise ModelConfigError(
                    f"{setting}={given!r} is there for the families only, not for a model that is served as "
                    "transformers computes it: leave it out"
                )
        self.placement = Placement(group, self.device, self.dtype, dict(engine_config.ops))
        self.module = meta_module(config)
        self.asked = what_layers_ask(self.module)
        if self.device.type == "cpu":
            # Grouped products of experts want bfloat16.
            self.module.config._experts_implementation = "eager"
        self.registry = LayoutRegistry.whole(self.module)
        self._cut_layers: set[int] = set()
        if group.size > 1:
            decisions = decisions_for(self.module, group.size)
            blocks: list[tuple[str, Any]] = list(attention_blocks(self.module, decisions))
            self._cut_layers = {block.layer_idx for _, block in blocks}
            self.registry = cut_model(self.module, group, decisions, sum_gradients=False)
        self.layers, self.outer = [], None
        self._kv: list[tuple[Tensor, Tensor]] = []

    @property
    def num_layers(self) -> int:
        return len(self.asked)

    @property
    def rope(self) -> RopeSettings | None:
        """The module rotates by itself, from positions alone."""
        return None

    @property
    def max_sequence_length(self) -> int:
        length = getattr(self.module.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if not isinstance(length, int):
            raise ModelConfigError(_refusal(self.module.config, "its config does not say how long a sequence may be"))
        return length

    @property
    def local_heads(self) -> tuple[int, int]:
        return self._heads(0)

    def _heads(self, layer: int) -> tuple[int, int]:
        """Query and KV heads of a layer here; some attentions are not cut, such as with a norm over all heads."""
        counts = self.asked[layer].num_heads, self.asked[layer].num_kv_heads
        if layer not in self._cut_layers:
            return counts
        rank, size = self.group.rank, self.group.size
        return len(query_heads(*counts, rank, size)), len(kv_heads(*counts, rank, size))

    def kv_cache_spec(self, layer: int) -> KVCacheSpec:
        asked = self.asked[layer]
        return KVCacheSpec(self._heads(layer)[1], asked.head_dim, self.dtype, asked.window)

    def held_parameters(self) -> list[tuple[int, int]]:
        sizes = [prod(self.registry.local_shape(name)) for name in self.registry]
        return [(size, size * self.dtype.itemsize) for size in sizes]

    def release(self) -> None:
        self.module, self._kv = nn.Module(), []

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, layers: range | None = None) -> Tensor:
        return ragged_logits(self.module, batch, self._attends(batch))

    @torch.inference_mode()
    def forward_with_states(self, batch: RaggedBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
        # What a module does between its states and its logits is its own: rows that want logits run once more.
        hidden: Tensor = self.module.base_model(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            phalanx=self._attends(batch),
        ).last_hidden_state[0]
        wanted = len(batch.logits_indices) > 0
        logits = self.forward(batch) if wanted else hidden.new_zeros(0, self.vocab_size, dtype=torch.float32)
        return logits, hidden[rows]

    def _attends(self, batch: RaggedBatch) -> Ragged:
        return Ragged(self.placement, batch, self._kv, self.kv_group_of)


def ragged_logits(module: Any, batch: RaggedBatch, attends: Ragged) -> Tensor:
    """float32 logits [R, vocab_size] of the wanted rows: all sequences of a batch run as one row of tokens."""
    kept: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(module.forward).parameters:
        kept["logits_to_keep"] = batch.logits_indices
    logits: Tensor = module(
        input_ids=batch.input_ids[None],
        position_ids=batch.positions[None],
        use_cache=False,
        phalanx=attends,
        **kept,
    ).logits[0]
    return (logits if kept else logits[batch.logits_indices]).float()


def meta_module(config: HFConfig) -> Any:
    """The causal LM of a config on the meta device, its attention ours.

    Raises:
        ModelConfigError: transformers cannot build it with another attention.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    register()
    try:
        settings = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config.given))
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ModelConfigError(f"transformers does not take this config: {error}") from error
    _check(config, settings)
    try:
        with torch.device("meta"):
            auto: Any = AutoModelForCausalLM
            return auto.from_config(settings, attn_implementation=NAME).eval()
    except (ValueError, KeyError, ImportError) as error:
        raise ModelConfigError(_refusal(config, f"its module cannot be built: {error}")) from error


def _check(config: HFConfig, settings: Any) -> None:
    rope = getattr(settings, "rope_parameters", None) or getattr(settings, "rope_scaling", None) or {}
    kinds = {part.get("rope_type") for part in [rope, *rope.values()] if isinstance(part, dict)}
    if kinds & {*_LENGTH_DEPENDENT_ROPE}:
        raise ModelConfigError(
            _refusal(config, "its rope depends on the length of a sequence, which its module knows of a batch only")
        )
    layers = set(getattr(settings, "layer_types", None) or ())
    if unknown := layers - {"full_attention", "sliding_attention"}:
        raise ModelConfigError(_refusal(config, f"it has layers of type {', '.join(sorted(unknown))}"))


def what_layers_ask(module: Any) -> list[LayerAttention]:
    """What each layer asks of its attention, found by running the module without values.

    Raises:
        ModelConfigError: a layer does not attend by transformers' interface, or asks for what is not supported.
    """
    config = module.config
    notes = Notes()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    # Of the ways to run experts, the one that needs no values.
    experts = getattr(config, "_experts_implementation", None)
    config._experts_implementation = "batched_mm"
    try:
        with torch.inference_mode():
            module(input_ids=tokens, position_ids=tokens, use_cache=False, phalanx=notes)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise ModelConfigError(_refusal(config, str(error).partition("\n")[0])) from error
    finally:
        config._experts_implementation = experts
    count = config.get_text_config(decoder=True).num_hidden_layers
    silent = [layer for layer in range(count) if layer not in notes.layers]
    if silent or len(notes.layers) != count:
        raise ModelConfigError(_refusal(config, f"its layers {silent} do not attend, or not by that interface"))
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or []
    for layer, kind in enumerate(kinds[:count]):
        if kind == "sliding_attention" and notes.layers[layer].window is None:
            raise ModelConfigError(_refusal(config, f"layer {layer} has a window that its attention is not told of"))
    return [notes.layers[layer] for layer in range(count)]


def _refusal(config: Any, why: str) -> str:
    return (
        f"model_type {config.model_type!r} has no family of its own here, and transformers' module of it cannot be "
        f"served: {why}"
    )
