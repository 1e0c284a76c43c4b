"""The measured model as the peers read it: a Hugging Face folder with the same weights."""

from __future__ import annotations

from pathlib import Path

import torch

from phalanx.engine.opened_model import OpenedModel
from phalanx.weights import open_source, write_hf_folder
from phalanx.weights.dummy import DummySource


def hf_folder(model: str, dtype: torch.dtype, dummy: bool, into: Path) -> Path:
    """A folder that transformers and vLLM load: the model's own if it is one, else a copy written to ``into``.

    Args:
        dtype: of the copied tensors.
        dummy: copy the random weights of ``load_format="dummy"``.

    Raises:
        ValueError: a serialised checkpoint, whose tensors have no Hugging Face names.
    """
    opened = OpenedModel(model)
    if opened.manifest is not None:
        raise ValueError(f"{model} is a serialised checkpoint, which other engines do not read: give its original")
    if opened.source is None and opened.path is not None and not dummy:
        return opened.path
    given = dict(opened.config.given)
    source = DummySource(given) if dummy else opened.source or open_source(opened.path)
    config = {
        **given,
        "dtype": str(dtype).removeprefix("torch."),
        "architectures": [_architecture(given["model_type"])],
    }
    folder = write_hf_folder(into, ((name, source.read(name).to(dtype)) for name in source.names()), config)
    if opened.tokenizer() is not None:
        opened.tokenizer().save_pretrained(folder)
    return folder


def _architecture(model_type: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
