"""Reading a model config: spellings, nesting, defaults, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from phalanx.models import HFConfig, ModelConfigError, read_config
from phalanx.models.rope import rope_settings
from tests.models.kit import bare_model

TINY = {"model_type": "llama", "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}


def test_it_reads_by_key_and_by_attribute() -> None:
    config = HFConfig(TINY)
    assert config["hidden_size"] == config.hidden_size == config.get("hidden_size") == 48
    assert config.get("no_such") is None and "no_such" not in config
    assert getattr(config, "no_such", 3) == 3 and not hasattr(config, "no_such")
    assert set(config.given) == set(TINY) and len(config) > len(TINY)


def test_the_text_part_lies_on_top() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 32, "eos_token_id": [1, 106]}
    config = HFConfig(
        {"model_type": "gemma3", "hidden_size": 7, "eos_token_id": 1, "dtype": "bfloat16", "text_config": text}
    )
    assert (config.model_type, config.hidden_size, config.dtype) == ("gemma3", 32, torch.bfloat16)
    assert config.eos_token_ids == {1, 106}
    assert "text_config" not in config.given


def test_a_nested_text_config_has_the_defaults_of_its_own_type() -> None:
    # Llava's own default is a Llama; this one says Mistral, whose default is 8 KV heads.
    nested = HFConfig({"model_type": "llava", "text_config": {"model_type": "mistral", "hidden_size": 48}})
    unnamed = HFConfig({"model_type": "llava", "text_config": {"hidden_size": 48}})
    assert nested.num_key_value_heads == 8 and nested.intermediate_size == 14336
    assert unnamed.intermediate_size == 11008


@pytest.mark.parametrize(
    "values",
    [
        {**TINY},
        {"model_type": "llama", "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20},
        {"model_type": "mistral", "hidden_size": 64, "num_attention_heads": 16},
        {"model_type": "gemma2", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3},
        {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 32},
        {"model_type": "phi", "hidden_size": 64, "num_attention_heads": 4},
        {"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4},
        {"model_type": "cohere", "hidden_size": 64, "num_attention_heads": 4},
    ],
    ids=lambda values: values["model_type"],
)
def test_what_a_file_leaves_out_is_what_transformers_assumes(values: dict[str, Any]) -> None:
    theirs = AutoConfig.for_model(**values)
    ours = HFConfig(values)
    model = bare_model({**values, "rms_norm_eps": 1e-6, "vocab_size": 8, "hidden_act": "silu"})
    expected = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert model.head_dim == expected
    assert model.num_kv_heads == (getattr(theirs, "num_key_value_heads", None) or theirs.num_attention_heads)
    rope = rope_settings(ours, expected)
    assert rope.theta == theirs.rope_parameters["rope_theta"]
    assert rope.rotary_dim == int(expected * theirs.rope_parameters.get("partial_rotary_factor", 1.0))


def test_values_derived_from_a_default_instance_do_not_leak() -> None:
    # A default Llama has 32 heads of 128, a default Gemma 2 has 26 layer types.
    assert "head_dim" not in HFConfig(TINY) and "num_key_value_heads" not in HFConfig(TINY)
    assert "layer_types" not in HFConfig({"model_type": "gemma2"})
    assert "rope_parameters" not in HFConfig(TINY) and HFConfig(TINY).rope_theta == 10000.0


def test_a_type_that_transformers_does_not_know_has_no_defaults() -> None:
    assert dict(HFConfig({"model_type": "my_own", "hidden_size": 8})) == {"model_type": "my_own", "hidden_size": 8}


def test_it_equals_itself_written_and_read() -> None:
    values = {**TINY, "dtype": torch.bfloat16, "id2label": {0: "a"}, "eos_token_id": (1, 2)}
    config = HFConfig(values)
    assert dict(HFConfig(json.loads(json.dumps(dict(config.given))))) == dict(config)
    assert values["dtype"] is torch.bfloat16 and config.dtype is torch.bfloat16


def test_later_changes_of_what_was_given_do_not_show() -> None:
    values = {**TINY, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    config = HFConfig(values)
    values["rope_parameters"]["factor"] = 3.0  # type: ignore[index]
    assert config.rope_parameters["factor"] == 2.0


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "torch.float32"}, torch.float32),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, torch.bfloat16),
        ({"dtype": "auto"}, None),
        ({"dtype": None}, None),
        ({}, None),
    ],
)
def test_dtype_in_both_spellings(values: dict[str, Any], dtype: torch.dtype | None) -> None:
    assert HFConfig({**TINY, **values}).dtype is dtype


@pytest.mark.parametrize(("value", "ids"), [(2, {2}), ([2, 7], {2, 7}), (None, set())])
def test_end_tokens_in_every_spelling(value: Any, ids: set[int]) -> None:
    assert HFConfig({**TINY, "eos_token_id": value}).eos_token_ids == ids


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "has no `model_type` \\(given None\\): is this a transformers config.json"),
        ({"model_type": 3}, "has no `model_type` \\(given 3\\)"),
        ({**TINY, "vision": object()}, "a object .* is no JSON value"),
    ],
)
def test_configs_that_are_none(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        HFConfig(values)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_size", None, "the config says hidden_size=None: expected a whole number"),
        ("hidden_size", "48", "the config says hidden_size='48': expected a whole number"),
        ("num_hidden_layers", True, "num_hidden_layers=True: expected a whole number"),
        ("num_key_value_heads", 1.5, "num_key_value_heads=1.5: expected a whole number"),
        ("head_dim", 0, "head_dim must be at least 1, the config says 0"),
        ("vocab_size", -1, "vocab_size must be at least 1, the config says -1"),
        ("rms_norm_eps", "tiny", "rms_norm_eps='tiny': expected a number"),
        ("dtype", "int8", "dtype 'int8' is not one of"),
        ("quantization_config", {"quant_method": "bitsandbytes"}, "'bitsandbytes' is not read; known are fp8"),
    ],
)
def test_impossible_values_are_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bare_model({**TINY, name: value}, dtype="auto")


def test_an_absent_value_is_named() -> None:
    with pytest.raises(ModelConfigError, match="the config of model_type 'my_own' has no `num_hidden_layers`"):
        bare_model({"model_type": "my_own", "hidden_act": "silu"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist: a model folder needs a config.json"),
        ("{", "cannot be read as JSON"),
        ("[1]", "holds a list, expected a JSON object"),
        ('{"hidden_size": 3}', "has no `model_type`"),
    ],
)
def test_unreadable_files(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelConfigError, match=message):
        read_config(tmp_path)


def test_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert read_config(tmp_path).given == TINY
