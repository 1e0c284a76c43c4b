import math

import gguf
import numpy
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from phalanx.weights import WeightError, open_source

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=50,
    max_position_embeddings=131072,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    rms_norm_eps=1e-5,
)


@pytest.fixture
def file(build):
    """A builder of a file with metadata, an embedding and no head."""
    return build().config(CONFIG).tensor("token_embd.weight", numpy.ones((50, 64), numpy.float32), "F16")


def config_of(builder):
    return open_source(builder.write()).hf_config()


def test_the_config_is_what_transformers_would_have_written(file):
    file.writer.add_bos_token_id(1)
    file.writer.add_eos_token_id(2)
    config = config_of(file)
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "vocab_size": 50,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_a_stored_head_unties_it(file):
    assert not config_of(file.tensor("output.weight", numpy.ones((50, 64), numpy.float32)))["tie_word_embeddings"]


def test_every_end_of_a_turn_ends_generation(file):
    file.writer.add_eos_token_id(2)
    file.writer.add_eot_token_id(7)
    assert config_of(file)["eos_token_id"] == [2, 7]


def llama3_factors(factor, head_dim=16, low=1.0, high=4.0, original=8192):
    """As llama.cpp's converter computes them."""
    factors = []
    for frequency in 1.0 / 500000.0 ** (numpy.arange(0, head_dim, 2, dtype=numpy.float32) / head_dim):
        wavelength = 2 * math.pi / frequency
        smooth = (original / wavelength - low) / (high - low)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return numpy.array(factors, numpy.float32)


def test_llama3_rope_is_found_from_its_factors(file):
    factors = llama3_factors(8.0)
    source = open_source(file.tensor("rope_freqs.weight", factors).write())
    assert source.names() == ["model.embed_tokens.weight"]
    rope = source.hf_config()["rope_parameters"]
    assert rope == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**source.hf_config()), "cpu")
    torch.testing.assert_close(inverse, plain / torch.from_numpy(factors))


def test_other_factors_are_refused(file):
    file.tensor("rope_freqs.weight", llama3_factors(8.0, high=8.0))
    with pytest.raises(WeightError, match="not those of Llama 3 with factor 8"):
        config_of(file)


def test_linear_and_yarn(file, build):
    file.writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    file.writer.add_rope_scaling_factor(4.0)
    assert config_of(file)["rope_parameters"] == {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0}
    yarn = build().config(CONFIG).tensor("token_embd.weight", numpy.ones((50, 64), numpy.float32))
    yarn.writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    yarn.writer.add_rope_scaling_factor(4.0)
    yarn.writer.add_rope_scaling_orig_ctx_len(32768)
    assert config_of(yarn)["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }


@pytest.mark.parametrize(
    ("set_value", "message"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "'longrope' cannot be read"),
        (
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            r"lacks .* llama\.rope\.scaling\.factor",
        ),
        (lambda w: w.add_sliding_window(64), r"attention\.sliding_window = 64 is not supported"),
        (lambda w: w.add_expert_count(8), r"expert_count = 8 is not supported"),
        (lambda w: w.add_rope_dimension_count(8), r"rope\.dimension_count = 8 beside heads of 16"),
    ],
)
def test_what_a_config_cannot_express_is_refused(file, set_value, message):
    set_value(file.writer)
    with pytest.raises(WeightError, match=message):
        config_of(file)


def test_missing_metadata_is_named(build):
    source = open_source(build().tensor("token_embd.weight", numpy.ones((5, 4), numpy.float32)).write())
    with pytest.raises(WeightError, match=r"lacks the metadata llama\.attention\.head_count"):
        source.hf_config()
