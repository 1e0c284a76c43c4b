"""GGUF files made from tiny random Hugging Face models, as the converter of llama.cpp makes them."""

import pytest

gguf = pytest.importorskip("gguf")

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def permute(rows, heads):
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


class Builder:
    """Collects metadata and tensors, writes the file."""

    def __init__(self, path, architecture):
        self.path = path
        self.writer = gguf.GGUFWriter(path, architecture)

    def config(self, config):
        """The usual metadata of a Hugging Face config."""
        writer = self.writer
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_key_length(config.head_dim)
        return self

    def model(self, model, quantization="F32"):
        """All weights of a model: matrices quantised, q and k of Llama permuted."""
        config = model.config
        for name, value in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            array = value.float().numpy()
            if config.model_type == "llama":
                if "q_proj" in name:
                    array = permute(array, config.num_attention_heads)
                if "k_proj" in name:
                    array = permute(array, config.num_key_value_heads)
            self.tensor(gguf_name(name), array, quantization if value.ndim > 1 else "F32")
        return self

    def tensor(self, name, array, quantization="F32"):
        kind = gguf.GGMLQuantizationType[quantization]
        self.writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        return self

    def write(self):
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path


@pytest.fixture
def build(tmp_path):
    return lambda architecture="llama": Builder(tmp_path / "model.gguf", architecture)
