"""What a footprint says without values is what loading really takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import LlamaForCausalLM

from phalanx.config import EngineConfig
from phalanx.distributed.absent import AbsentRank
from phalanx.engine.footprint import ShapesOnly, blocks_of, hollow_model, rank_footprint
from phalanx.models import load_families
from phalanx.models.hf_config import read_config
from phalanx.models.kv_spec import KVCacheSpec, KVGroup
from phalanx.models.policy import policy_for
from phalanx.weights import open_source
from tests.models.tiny import llama, llama_config, save


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = llama_config(tie_word_embeddings=request.param, attention_bias=True)
    return save(llama(config), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", [1, 2, 4, 6])
def test_it_is_what_loading_takes(folder: Path, world: int, dtype: str) -> None:
    load_families()
    config, source = read_config(folder), open_source(folder)
    # Other layouts pad, which shows in so small a model.
    settings = EngineConfig(dtype=dtype, device="cpu", ops={"linear": "plain"})
    for rank in range(world):
        real = policy_for(config)(config, source=source).build_model(settings, AbsentRank(rank, world))
        hollow = hollow_model(config, source, settings, AbsentRank(rank, world))
        assert rank_footprint(hollow) == rank_footprint(real)
        assert all(p.data.is_meta for layer in hollow.layers for p in layer.finalized().values() if p is not None)


def test_one_rank_holds_what_transformers_counts(folder: Path) -> None:
    load_families()
    hollow = hollow_model(read_config(folder), open_source(folder), EngineConfig(dtype="float32"), AbsentRank(0, 1))
    counted = sum(p.numel() for p in LlamaForCausalLM.from_pretrained(folder).parameters())
    found = rank_footprint(hollow)
    assert (found.parameters, found.parameter_bytes) == (counted, 4 * counted)
    # Two layers, K and V, two heads of 12, four bytes.
    assert (found.query_heads, found.kv_heads, found.kv_bytes_per_token) == (4, 2, 2 * 2 * 2 * 12 * 4)
    assert found.kv_block_bytes == 16 * found.kv_bytes_per_token


def test_a_slice_of_a_shape(folder: Path) -> None:
    source = ShapesOnly(open_source(folder))
    name = "model.embed_tokens.weight"
    assert source.tensor(name)[3:5, :7].shape == (2, 7) and source.tensor(name).load().is_meta


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 2), (16, 2), (17, 4), (100, 7 + 3), (1000, 63 + 3)])
def test_a_window_lets_blocks_go(tokens: int, blocks: int) -> None:
    groups = [KVGroup(KVCacheSpec(1, 8, None, window), (layer,)) for layer, window in enumerate((None, 32))]  # type: ignore[arg-type]
    model = SimpleNamespace(kv_groups=groups, engine_config=EngineConfig(block_size=16))
    assert blocks_of(model, tokens) == blocks  # type: ignore[arg-type]


def test_an_absent_rank_exchanges_nothing() -> None:
    with pytest.raises(RuntimeError, match="do not exist"):
        AbsentRank(1, 2).barrier()
