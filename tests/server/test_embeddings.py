"""/v1/embeddings through the official client."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import openai
import pytest

from phalanx import LLM
from tests.server.running import NAME, Server

pytestmark = pytest.mark.xdist_group("server")


def test_embeddings_are_those_of_the_library(server: Server, client: openai.OpenAI, tiny_folder: Path) -> None:
    texts, ids = ["hello", "tell me", "x" * 40], [[5, 6, 7], [8]]
    with LLM(tiny_folder, num_blocks=100, block_size=8) as llm:
        expected = [*llm.embed(texts), *llm.embed(ids)]
        mean = llm.embed(texts[2], "mean")[0]
        count = sum(len(llm.generate(text, max_tokens=1)[0].prompt_token_ids) for text in texts)
    answer = client.embeddings.create(model=NAME, input=texts)
    assert [one.index for one in answer.data] == [0, 1, 2] and answer.model == NAME
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == count
    for one, vector in zip(answer.data, expected, strict=False):
        np.testing.assert_allclose(one.embedding, vector, atol=1e-5)
        assert np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-5)
    found = client.embeddings.create(model=NAME, input=ids, encoding_format="float").data
    np.testing.assert_allclose([one.embedding for one in found], expected[3:], atol=1e-5)
    np.testing.assert_allclose(
        client.embeddings.create(model=NAME, input=ids[0]).data[0].embedding, expected[3], atol=1e-5
    )
    again = client.embeddings.create(model=NAME, input=texts[2], extra_body={"pooling": "mean"})
    np.testing.assert_allclose(again.data[0].embedding, mean, atol=1e-5)
    raw = server.http.post("/v1/embeddings", json={"model": NAME, "input": "hello", "encoding_format": "base64"})
    numbers = np.frombuffer(base64.b64decode(raw.json()["data"][0]["embedding"]), np.float32)
    np.testing.assert_allclose(numbers, expected[0], atol=1e-5)
    server.wait_idle()


def test_dimensions_cut_only_where_that_is_asked_for(client: openai.OpenAI) -> None:
    whole = np.array(client.embeddings.create(model=NAME, input="hello").data[0].embedding)
    with pytest.raises(openai.BadRequestError, match="say truncate=true") as caught:
        client.embeddings.create(model=NAME, input="hello", dimensions=8)
    assert caught.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError, match="dimensions, which says where") as caught:
        client.embeddings.create(model=NAME, input="hello", extra_body={"truncate": True})
    assert caught.value.param == "truncate"
    cut = client.embeddings.create(model=NAME, input="hello", dimensions=8, extra_body={"truncate": True})
    np.testing.assert_allclose(cut.data[0].embedding, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-5)
    with pytest.raises(openai.BadRequestError, match=f"embeddings have {len(whole)} numbers"):
        client.embeddings.create(model=NAME, input="hello", dimensions=5000, extra_body={"truncate": True})


def test_faults_name_the_input(client: openai.OpenAI) -> None:
    for given, message in (([[9] * 4097], "4097 tokens, the limit is 4096"), ([[99999]], "outside the vocabulary")):
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            client.embeddings.create(model=NAME, input=given)
        assert caught.value.param == "input"
    with pytest.raises(openai.BadRequestError, match="65 inputs in one request, the limit is 64"):
        client.embeddings.create(model=NAME, input=["x"] * 65)
