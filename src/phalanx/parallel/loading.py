"""A model that is built without its values, and gets the slices that its rank holds straight from the checkpoint.

    model = from_pretrained("path/to/llama")     # shapes only
    parallelize(model, mesh)                     # or initialize(model=model, ...): cut, then read

No rank ever holds more than its shards and the part of one tensor that is being read.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.config import parse_dtype
from phalanx.layout import shard_into
from phalanx.layout.partition import Sliceable
from phalanx.parallel.registry import LayoutRegistry
from phalanx.weights.open import open_source
from phalanx.weights.source import WeightError, WeightSource, unknown_tensor

_log = logging.getLogger("phalanx")


@dataclass(frozen=True)
class PendingWeights:
    """Where the values of a model lie that has only shapes, and the dtype that they are read as (None: as stored)."""

    source: WeightSource
    dtype: torch.dtype | None


def from_pretrained(path: str | os.PathLike[str], *, dtype: str | torch.dtype | None = None, **config: Any) -> Any:
    """The causal LM in a Hugging Face folder (or of a hub id) on the meta device; its values are read when it is cut.

    Args:
        dtype: of the parameters; default: as they are stored.
        config: changes of the model's config, `attn_implementation` among them.

    Raises:
        WeightError: no weights there, or files that are missing or broken.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    source = open_source(path)
    if problems := source.verify():
        raise WeightError(*problems)
    settings = AutoConfig.from_pretrained(path, **{k: v for k, v in config.items() if k != "attn_implementation"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            settings, **{k: v for k, v in config.items() if k == "attn_implementation"}
        )
    model.pending_weights = PendingWeights(source, None if dtype is None else parse_dtype(dtype))
    model.config.name_or_path = os.fspath(path)
    return model


def load_pending(model: nn.Module, registry: LayoutRegistry, device: torch.device) -> None:
    """Read this rank's slices of a model from `from_pretrained` that has been cut; nothing for another model.

    Raises:
        WeightError: tensors that the checkpoint lacks or has in another shape, all of them at once.
    """
    pending = getattr(model, "pending_weights", None)
    if pending is None:
        return
    if hasattr(model, "peft_config"):
        raise ValueError(
            "adapters were added to a model that has no values yet (phalanx.from_pretrained): load it with "
            "transformers' from_pretrained, add the adapters, and cut it then"
        )
    names = _Names(model, pending.source)
    problems = []
    found: dict[str, Sliceable] = {}
    for name, layout in registry.items():
        try:
            found[name] = names.find(name, layout.shape)
        except WeightError as error:
            problems += error.problems
    if problems:
        raise WeightError(*problems)
    for name, tensor in found.items():
        layout = registry[name]
        dtype = pending.dtype or tensor.dtype
        values = torch.empty(registry.local_shape(name), dtype=dtype, device=device)
        shard_into(values, tensor, layout.partition, registry.tp_rank, registry.tp_size)
        parameter = model.get_parameter(name)
        # The same object, so that tied modules and optimizers keep it.
        torch.utils.swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))
    _fill_buffers(model, names, device)
    _tell_unread(model, names)
    del model.pending_weights


def _tell_unread(model: Any, names: _Names) -> None:
    """Warn of tensors of the checkpoint that the model has no place for: it may be one of another architecture."""
    tied = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    expected = {spelling for name in tied for spelling in names.spellings(name)}
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq$"]
    unread = [
        name
        for name in sorted(names.stored - names.read - expected)
        if not any(re.search(pattern, name) for pattern in patterns)
    ]
    if unread:
        _log.warning(
            "%d tensors of the checkpoint are not used by %s, %s among them: is it the right checkpoint?",
            len(unread),
            type(model).__name__,
            ", ".join(unread[:3]),
        )


class _Names:
    """The tensors of a checkpoint under the names of the module, which may have another prefix or fused experts."""

    def __init__(self, model: nn.Module, source: WeightSource) -> None:
        self.source = source
        self.stored = set(source.names())
        self.read: set[str] = set()
        self.prefix = f"{getattr(model, 'base_model_prefix', '') or 'model'}."

    def find(self, name: str, shape: Sequence[int]) -> Sliceable:
        """The stored tensor of `shape` that belongs to the parameter `name`."""
        for spelling in self.spellings(name):
            if spelling in self.stored:
                tensor = self.source.tensor(spelling)
                self.read.add(spelling)
                if tuple(tensor.shape) != tuple(shape):
                    raise WeightError(
                        f"{spelling} is {tuple(tensor.shape)} in the checkpoint, the model has {tuple(shape)}"
                    )
                return tensor
        if (experts := self._experts(name)) is not None:
            if tuple(experts.shape) != tuple(shape):
                raise WeightError(f"the experts of {name} make {tuple(experts.shape)}, the model has {tuple(shape)}")
            return experts
        raise unknown_tensor(name, self.stored, "the checkpoint")

    def spellings(self, name: str) -> Iterator[str]:
        for each in spellings(name):
            yield each
            yield each.removeprefix(self.prefix) if each.startswith(self.prefix) else self.prefix + each

    def _experts(self, name: str) -> _FusedExperts | None:
        """Experts that the module keeps in one tensor, [experts, out, in], and the checkpoint in one each."""
        match = re.fullmatch(r"(.*)\.experts\.(gate_up_proj|down_proj)", name)
        if match is None:
            return None
        for path in self.spellings(match[1]):
            for base in (path, re.sub(r"\.mlp$", ".block_sparse_moe", path)):
                for parts in _EXPERT_PARTS[match[2]]:
                    if all(f"{base}.experts.0.{part}.weight" in self.stored for part in parts):
                        count = sum(
                            f"{base}.experts.{e}.{parts[0]}.weight" in self.stored for e in range(len(self.stored))
                        )
                        rows = [
                            [self.source.tensor(f"{base}.experts.{e}.{part}.weight") for part in parts]
                            for e in range(count)
                        ]
                        self.read.update(f"{base}.experts.{e}.{part}.weight" for e in range(count) for part in parts)
                        return _FusedExperts(rows)
        return None


# What modules call it, and what checkpoints do.
_RENAMED = ((".mlp.gate.", ".block_sparse_moe.gate."), ("lm_head.", "embed_out."))
_EXPERT_PARTS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}


def spellings(name: str) -> Iterator[str]:
    """What a checkpoint may call the parameter that a module of transformers calls `name`; that name first."""
    yield name
    for new, old in _RENAMED:
        if new in name:
            yield name.replace(new, old, 1)


class _FusedExperts:
    """Tensors of single experts, read as one [experts, out, in]; the parts of an expert follow each other along out."""

    def __init__(self, experts: Sequence[Sequence[Sliceable]]) -> None:
        self._experts = experts
        self._height = [part.shape[0] for part in experts[0]]
        self.shape = (len(experts), sum(self._height), experts[0][0].shape[1])
        self.dtype = experts[0][0].dtype

    def read_into(self, out: Tensor, index: tuple[slice, ...]) -> None:
        whole = (*index, *(slice(0, size) for size in self.shape[len(index) :]))
        first, last = whole[1].start or 0, self.shape[1] if whole[1].stop is None else whole[1].stop
        for row, expert in enumerate(self._experts[whole[0]]):
            start = 0
            for part, height in zip(expert, self._height, strict=True):
                begin, end = max(first, start), min(last, start + height)
                if begin < end:
                    out[row, begin - first : end - first].copy_(part[begin - start : end - start, whole[2]])
                start += height

    def __getitem__(self, index: Any) -> Tensor:
        sizes = [len(range(*part.indices(size))) for part, size in zip(index, self.shape, strict=False)]
        out = torch.empty([*sizes, *self.shape[len(sizes) :]], dtype=self.dtype)
        self.read_into(out, index)
        return out


def _fill_buffers(model: Any, names: _Names, device: torch.device) -> None:
    """Buffers are stored, or computed from the config by the model's own initialisation."""
    stored = {name for name in model.state_dict() if name not in dict(model.named_parameters(remove_duplicate=False))}
    unset = []
    for path, module in model.named_modules():
        own = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        if not own:
            continue
        for name, buffer in own.items():
            values = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
            if buffer.is_floating_point():
                values.fill_(float("nan"))
            persistent = name not in module._non_persistent_buffers_set
            module.register_buffer(name, values, persistent=persistent)
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = True
        model._init_weights(module)
        for name in own:
            full = f"{path}.{name}" if path else name
            if full in stored and any(spelling in names.stored for spelling in names.spellings(full)):
                module.get_buffer(name).copy_(names.find(full, own[name].shape)[...])
            elif bool(module.get_buffer(name).isnan().any()):
                unset.append(full)
    if unset:
        raise WeightError(
            f"the buffers {', '.join(unset)} are neither in the checkpoint nor set by {type(model).__name__}: load the "
            "model with transformers and pass it as it is"
        )
