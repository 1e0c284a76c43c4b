"""The arithmetic of benchmarks/serving/perplexity.py, and that what it reorders stays the same model."""

import math

import numpy as np
import pytest
import torch
from benchmarks.serving.perplexity import cost, deal, help_topics, reordered
from transformers import LlamaConfig, LlamaForCausalLM


def test_ratio_and_error_clustered_by_document():
    plain = np.array([[1.0, 2.0], [3.0, 1.0], [2.0, 2.0]])
    other = plain + np.array([[0.1, 0.3], [0.0, 0.2], [0.5, 0.7]])
    found = cost(plain, other, ["a", "a", "b"])
    # Differences: 0.3 in the mean; a's tokens sum to 0.6 - 4 * 0.3, b's to 1.2 - 2 * 0.3.
    assert found["perplexity"] == pytest.approx(math.exp(12.8 / 6))
    assert found["ratio"] == pytest.approx(math.exp(0.3))
    error = math.sqrt(2 / 1 * (0.6**2 + 0.6**2)) / 6
    assert found["ratio_standard_error"] == pytest.approx(math.exp(0.3) * error)


def test_windows_of_one_token_each_in_documents_of_their_own_have_the_usual_error():
    chance = np.random.default_rng(0)
    plain, other = chance.random((20, 1)), chance.random((20, 1))
    found = cost(plain, other, [str(number) for number in range(20)])
    assert found["ratio_standard_error"] / found["ratio"] == pytest.approx((other - plain).std(ddof=1) / math.sqrt(20))


def test_windows_are_dealt_document_by_document():
    documents = {"a": list(range(9)), "short": [1, 2], "b": list(range(50, 57))}
    windows = deal(documents, [99], 4, 4)
    assert [window.document for window in windows] == ["a", "b", "a", "b"]
    assert [window.tokens for window in windows[:3]] == [[99, 0, 1, 2], [99, 50, 51, 52], [99, 3, 4, 5]]
    with pytest.raises(ValueError, match=r"6 windows of 3 tokens .* has 5 in 2"):
        deal(documents, [99], 4, 6)
    with pytest.raises(ValueError, match="at least two documents"):
        deal({"a": list(range(50))}, [], 4, 4)


def test_no_paragraph_of_the_help_is_read_twice():
    paragraphs = [" ".join(text.split()) for topic in help_topics().values() for text in topic.split("\n\n")]
    paragraphs = [text for text in paragraphs if text]
    assert len(paragraphs) > 1000 and len(set(paragraphs)) == len(paragraphs)


def test_a_reordered_model_is_the_same_function():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    ids = torch.randint(64, (2, 10))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    after = reordered(before.items(), config.to_dict())
    assert not any(torch.equal(after[name], before[name]) for name in before)
    with torch.no_grad():
        expected = model(ids).logits
        model.load_state_dict(after)
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_norm\.weight is none of its tensors"):
        reordered([("model.layers.0.self_attn.q_norm.weight", torch.ones(8))], config.to_dict())
