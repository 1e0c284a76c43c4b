import os
import sys

import gguf
import numpy
import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen3Config
from transformers import Qwen2ForCausalLM as Qwen2
from transformers import Qwen3ForCausalLM as Qwen3

from phalanx.layout import Partition, attention_blocks, shard
from phalanx.weights import WeightError, open_source
from phalanx.weights.gguf import GGUFSource

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50,
    "max_position_embeddings": 128,
}


def tiny(model_class=LlamaForCausalLM, config_class=LlamaConfig, **changes):
    torch.manual_seed(0)
    return model_class(config_class(**{**SIZES, **changes})).eval()


@pytest.mark.parametrize(
    ("model_class", "config_class", "changes"),
    [
        (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
        (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "rope_theta": 5e5, "rms_norm_eps": 1e-5}),
        (Qwen2, Qwen2Config, {}),
        (Qwen3, Qwen3Config, {"tie_word_embeddings": True}),
    ],
)
def test_config_and_weights_give_the_logits_of_the_original(build, model_class, config_class, changes):
    model = tiny(model_class, config_class, **changes)
    architecture = model.config.model_type
    source = open_source(build(architecture).config(model.config).model(model).write())
    assert source.verify() == []
    config = source.hf_config()
    again = model_class(AutoConfig.for_model(**config)).eval()
    assert again.config.tie_word_embeddings == model.config.tie_word_embeddings
    missing = again.load_state_dict({name: source.read(name) for name in source.names()}, strict=False)
    assert missing.unexpected_keys == [] and set(missing.missing_keys) <= {"lm_head.weight"}
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_slices_are_those_of_the_whole_tensor(build):
    model = tiny()
    source = open_source(build().config(model.config).model(model, "Q8_0").write())
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight"):
        whole, lazy = source.read(name), source.tensor(name)
        assert (lazy.shape, lazy.dtype) == (whole.shape, whole.dtype)
        for index in [(slice(3, 21),), (slice(0, 16), slice(5, 40)), (slice(None), slice(32)), (slice(7, 7),)]:
            index = index[: whole.ndim]
            part = lazy[index]
            assert torch.equal(part, whole[index]) and part.is_contiguous()


def test_shards_of_permuted_rows_hold_whole_heads(build):
    model = tiny()
    source = open_source(build().config(model.config).model(model).write())
    _, k, _ = attention_blocks(4, 2, 16)
    name = "model.layers.0.self_attn.k_proj.weight"
    for rank in range(4):
        expected = shard(model.get_parameter(name), Partition.column([k]), rank, 4)
        assert torch.equal(shard(source.tensor(name), Partition.column([k]), rank, 4), expected)


def dequantisable(kind):
    try:
        gguf.quants.dequantize(numpy.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), numpy.uint8), kind)
    except NotImplementedError:
        return False
    return not kind.name.startswith(("F", "BF", "I8", "I16", "I32", "I64"))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # random bytes make odd scales
@pytest.mark.parametrize("kind", list(filter(dequantisable, gguf.GGMLQuantizationType)), ids=lambda kind: kind.name)
def test_every_quantisation_is_read_by_rows(build, kind):
    data = numpy.random.default_rng(0).integers(0, 256, (5, 256 // gguf.GGML_QUANT_SIZES[kind][0], 1), numpy.uint8)
    data = numpy.repeat(data, gguf.GGML_QUANT_SIZES[kind][1], axis=2).reshape(5, -1)
    builder = build()
    builder.writer.add_tensor("output.weight", data, raw_dtype=kind)
    source = open_source(builder.write())
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    assert source.info("lm_head.weight") == ((5, 256), torch.float32)
    torch.testing.assert_close(source.read("lm_head.weight"), expected, rtol=0, atol=0, equal_nan=True)
    part = source.tensor("lm_head.weight")[1:3, 100:200]
    torch.testing.assert_close(part, expected[1:3, 100:200], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16), ("F32", torch.float32)])
def test_unquantised_types_are_kept(build, name, dtype):
    value = torch.randn(4, 8).to(dtype)
    path = build().tensor("output.weight", value.float().numpy(), name).write()
    read = open_source(path).read("lm_head.weight")
    assert read.dtype == dtype and torch.equal(read, value)


def test_a_large_tensor_is_decoded_in_chunks(build, monkeypatch):
    monkeypatch.setattr("phalanx.weights.gguf.source._CHUNK_ELEMENTS", 100)
    value = torch.randn(10, 32)
    source = open_source(build().tensor("output.weight", value.numpy()).write())
    assert torch.equal(source.tensor("lm_head.weight")[1:9, 3:], value[1:9, 3:])


def test_a_truncated_file_is_named_before_anything_is_read(build):
    model = tiny()
    path = build().config(model.config).model(model).write()
    size = path.stat().st_size
    os.truncate(path, size - 1000)
    source = open_source(path)
    assert any("is truncated: it ends at byte" in problem for problem in source.verify())
    with pytest.raises(WeightError, match="truncated"):
        source.names()
    os.truncate(path, 300)
    assert "truncated, corrupt or no GGUF" in open_source(path).verify()[0]


def test_a_file_that_shrinks_later_is_an_error(build):
    path = build().tensor("output.weight", numpy.ones((64, 64), numpy.float32)).write()
    source = open_source(path)
    os.truncate(path, path.stat().st_size - 1000)
    with pytest.raises(WeightError, match="become shorter"):
        source.read("lm_head.weight")


def test_what_is_not_supported_is_refused_by_name(build):
    assert "'mamba'; GGUF is read for: llama" in open_source(build("mamba").write()).verify()[0]
    builder = build().tensor("blk.0.ffn_gate_exps.weight", numpy.ones((2, 4, 4), numpy.float32))
    assert "ffn_gate_exps.weight, which models" in open_source(builder.write()).verify()[0]
    assert "holds no weights" in open_source(build().write()).verify()[0]
    builder = build().tensor("output.weight", numpy.ones((4, 4), numpy.float32))
    builder.writer.add_uint16("split.count", 3)
    assert "one part of 3" in open_source(builder.write()).verify()[0]
    builder = build()
    kind = gguf.GGMLQuantizationType.Q8_1
    builder.writer.add_tensor("output.weight", numpy.zeros((2, 40), numpy.uint8), raw_dtype=kind)
    assert "cannot dequantise Q8_1" in open_source(builder.write()).verify()[0]
    builder = build().tensor("blk.0.attn_q.weight", numpy.ones((4, 4), numpy.float32))
    assert "head counts of llama" in open_source(builder.write()).verify()[0]


def test_an_absent_gguf_package_is_explained(build, monkeypatch):
    path = build().tensor("output.weight", numpy.ones((4, 4), numpy.float32)).write()
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'phalanx[gguf]'" in GGUFSource(path).verify()[0]
