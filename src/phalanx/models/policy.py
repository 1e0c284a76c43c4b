"""InferencePolicy: how a model is put together from a weight source, or from a serialised inference checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from phalanx.config import EngineConfig
from phalanx.distributed.group import Group
from phalanx.models.container import LayerContainer, Target
from phalanx.models.container_map import ContainerMap
from phalanx.models.hf_config import HFConfig, ModelConfigError
from phalanx.models.parameter import DeclarationError
from phalanx.models.serialized import restore_parameters
from phalanx.weights import WeightError, WeightSource
from phalanx.weights.heap import give_back_freed_memory
from phalanx.weights.quantized import unpacked

if TYPE_CHECKING:
    from phalanx.models.base import TransformerModel

POLICIES: dict[str, type[InferencePolicy]] = {}
"""Every policy by the Hugging Face ``model_type`` that it serves; a policy enters by being defined."""

PARTS = {
    "model_class": ("instantiate_model", "build_model"),
    "layer_container": ("make_layer_container", "build_container_map"),
    "outer_container": ("make_outer_container", "build_container_map"),
}
"""What a policy names, and the hooks that make it needless."""


TRIM_BYTES = 256 << 20
"""Source bytes between two times that the allocator is told to let go of what loading has freed."""


class InferencePolicy:
    """Assembles a model of one architecture. A usual one only names its parts::

        class LlamaPolicy(InferencePolicy):
            model_types = ("llama",)
            model_class = TransformerModel
            layer_container = LlamaLayer
            outer_container = LlamaOuter

    Args:
        model_config: the Hugging Face config.
        source: where the weights come from, or
        inference_checkpoint: a folder that ``serialize`` wrote. Exactly one of the two.

    Attributes:
        model_types: the ``model_type``s that it serves; () keeps a policy out of POLICIES.
        layer_prefix: where the layers' tensors are found, one prefix or several.
        unmapped: prefixes or patterns of tensors to ignore.

    Raises:
        DeclarationError: at class definition, another policy serves the model type already (``replace=True`` in the
            class statement replaces it, also under the model types of its base), or a part is not named.
        ValueError: both or neither of ``source`` and ``inference_checkpoint``.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    model_class: ClassVar[type[TransformerModel]]
    layer_container: ClassVar[type[LayerContainer]]
    outer_container: ClassVar[type[LayerContainer]]
    layer_prefix: ClassVar[str | Sequence[str]] = "model.layers"
    unmapped: ClassVar[Sequence[str]] = ("*.rotary_emb.inv_freq",)

    def __init_subclass__(cls, replace: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A class that extends a registered one takes its place only where it says so.
        model_types: Any = cls.model_types if replace else vars(cls).get("model_types", ())
        if not isinstance(model_types, (tuple, list)) or not all(isinstance(name, str) for name in model_types):
            raise DeclarationError(f"{cls.__name__}: model_types is a tuple of names, given {model_types!r}")
        if replace and not model_types:
            raise DeclarationError(f"{cls.__name__}: replace=True, but no model_types say what to replace")
        if model_types:
            _check_parts(cls)
            _load_built_in(cls)
        for model_type in model_types:
            known = POLICIES.get(model_type)
            # Made anew, as when its module is loaded again.
            same = known is not None and (known.__module__, known.__qualname__) == (cls.__module__, cls.__qualname__)
            if known is not None and not same and not replace:
                raise DeclarationError(
                    f"{cls.__name__}: {known.__module__}.{known.__name__} serves model_type {model_type!r} already; "
                    f"write `class {cls.__name__}(..., replace=True)` to take its place"
                )
        POLICIES.update(dict.fromkeys(model_types, cls))

    def __init__(
        self,
        model_config: HFConfig,
        source: WeightSource | None = None,
        inference_checkpoint: str | Path | None = None,
    ) -> None:
        if (source is None) == (inference_checkpoint is None):
            given = "both" if source is not None else "neither"
            raise ValueError(f"{type(self).__name__} takes a weight source or an inference checkpoint, given {given}")
        self.model_config = model_config
        packing = model_config.get("quantization_config")
        self.source = None if source is None else unpacked(source, packing)
        self.inference_checkpoint = inference_checkpoint

    def build_model(self, engine_config: EngineConfig, group: Group) -> TransformerModel:
        """The model with all its parameters in place."""
        self.model = self.instantiate_model(engine_config, group)
        self.populate_model_parameters()
        return self.model

    def instantiate_model(self, engine_config: EngineConfig, group: Group) -> TransformerModel:
        """The model without parameters; override to choose its class from the config."""
        return self.model_class(self.model_config, engine_config, group)

    def make_layer_container(self, model: TransformerModel, layer: int) -> LayerContainer:
        """The container of one layer; override where layers differ."""
        return self.layer_container(model)

    def make_outer_container(self, model: TransformerModel) -> LayerContainer:
        """The container of what is in no layer; override where it depends on the config."""
        return self.outer_container(model)

    def build_container_map(self) -> ContainerMap:
        """The containers of ``self.model`` and the names that they are found under."""
        result = ContainerMap()
        layers = [self.make_layer_container(self.model, layer) for layer in range(self.model.num_layers)]
        outer = self.make_outer_container(self.model)
        result.set_transformer_params(self.layer_prefix, layers)
        result.set_non_transformer_params(outer)
        result.set_unmapped_params(self.unmapped)
        result.set_unmapped_params(self.model.unmapped_params())
        if self.model.tied_head:
            # Checkpoints of tied models may store the head all the same.
            result.set_unmapped_params(outer.source_of(Target("word_unembed", "params")))
        return result

    def populate_model_parameters(self) -> None:
        """Fills the containers, from the source or from the serialised checkpoint, and hands them to the model.

        Raises:
            WeightError: listing all faults; those that the source's headers show, before anything is allocated.
        """
        containers = self.build_container_map()
        if self.source is not None:
            _read(self.source, containers)
        else:
            restore_parameters(str(self.inference_checkpoint), type(self).__name__, self.model, containers)
        containers.validate()
        self.model.set_parameters(containers.transformer_params, containers.non_transformer_params)


def _read(source: WeightSource, containers: ContainerMap) -> None:
    """Fills the containers, after everything that can be known without reading values is in order."""
    problems = source.verify()
    try:
        names = list(source.names())
    except WeightError as error:
        # Files that cannot be listed; verify() said so too.
        raise WeightError(*dict.fromkeys([*problems, *error.problems])) from None
    shapes: dict[str, tuple[int, ...] | None] = {}
    for name in names:
        try:
            shapes[name] = source.info(name).shape
        except WeightError as error:
            shapes[name] = None
            problems += error.problems
    containers.begin(shapes, dict.fromkeys(problems))
    read = 0
    for name in names:
        tensor = source.tensor(name)
        containers.map_param(name, tensor)
        read += tensor.shape.numel() * tensor.dtype.itemsize
        if read > TRIM_BYTES:
            give_back_freed_memory()
            read = 0


def _load_built_in(cls: type[InferencePolicy]) -> None:
    """Lets the families of this package come first, so that it does not depend on the order of imports who replaces
    whom."""
    if not cls.__module__.startswith(f"{__package__}."):
        from phalanx.models import load_families

        load_families()


def _check_parts(cls: type[InferencePolicy]) -> None:
    """DeclarationError for a policy that neither names a part nor builds it itself."""
    own = {hook for base in cls.__mro__ if base not in (InferencePolicy, object) for hook in vars(base)}
    for part, hooks in PARTS.items():
        if not hasattr(cls, part) and not own & {*hooks}:
            raise DeclarationError(f"{cls.__name__}: name its `{part}`, or override {' or '.join(hooks)}")


def policy_for(model_config: HFConfig) -> type[InferencePolicy]:
    """The policy of a config's ``model_type``; the generic one for a causal LM of transformers that no family serves.

    Raises:
        ModelConfigError: none serves it; the nearest and all known types are named.
    """
    from difflib import get_close_matches

    from phalanx.models.generic import GenericPolicy, is_causal_lm

    model_type = model_config["model_type"]
    if model_type not in POLICIES:
        if is_causal_lm(model_type):
            return GenericPolicy
        near = get_close_matches(model_type, POLICIES)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise ModelConfigError(f"model_type {model_type!r} is not served; {hint}known: {', '.join(sorted(POLICIES))}")
    return POLICIES[model_type]
