from dataclasses import replace

import pytest

from phalanx.cli.options import EngineOptions, SamplingOptions, parse_size
from phalanx.config import EngineConfig, engine_config
from phalanx.engine import Guide, SamplingParams
from phalanx.engine.sampling_params import sampling_params

# Settings that a single command line has no use for.
NOT_FLAGS = {"seed", "cache_salt", "max_tracked_sequences", "collective_timeout"}

ENGINE = EngineOptions(
    tp=2,
    dtype="float32",
    device="cpu",
    threads=1,
    load_format="dummy",
    quantization="int8",
    kv_cache_dtype="fp8",
    batch_invariant=True,
    no_cuda_graphs=True,
    block_size=4,
    num_blocks=9,
    memory_fraction=0.5,
    max_model_len=64,
    max_num_seqs=3,
    max_num_batched_tokens=8,
    no_prefix_cache=True,
    loop="async",
    all_reduce="nccl",
    op=["attention=reference"],
    plugin=["json"],
)
SAMPLING = SamplingOptions(
    max_tokens=5,
    min_tokens=1,
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_p=0.1,
    seed=3,
    n=2,
    stop=["a", "b"],
    stop_token_id=[4],
    include_stop=True,
    ignore_eos=True,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.2,
    logit_bias=["5=-1.5"],
    bad_word=["x"],
    logprobs=1,
    prompt_logprobs=2,
    keep_special_tokens=True,
    guide="regex=a=b",
)


def test_every_engine_setting_has_a_flag():
    settings = {**ENGINE.settings(), **replace(ENGINE, num_blocks=None, kv_cache_memory="1M").settings()}
    assert set(settings) == set(EngineConfig.model_fields) - NOT_FLAGS


def test_every_sampling_setting_has_a_flag():
    assert set(SAMPLING.settings()) == set(SamplingParams.model_fields)


def test_a_guide_may_lie_in_a_file(tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    given = SamplingOptions(guide=f"json_schema=@{tmp_path / 'schema.json'}").settings()
    assert given == {"guide": {"kind": "json_schema", "text": '{"type": "object"}'}}
    with pytest.raises(ValueError, match=r"--guide: .*absent\.json cannot be read"):
        SamplingOptions(guide=f"json_schema=@{tmp_path / 'absent.json'}").settings()


def test_flags_mean_what_the_settings_mean():
    assert engine_config(ENGINE.settings()) == EngineConfig(
        tensor_parallel_size=2, dtype="float32", device="cpu", num_threads=1, load_format="dummy",
        quantization="int8", kv_cache_dtype="fp8", batch_invariant=True, cuda_graphs=False, block_size=4,
        num_blocks=9, memory_fraction=0.5, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=8,
        prefix_cache=False, loop="async", all_reduce="nccl", ops={"attention": "reference"}, plugins=("json",),
    )  # fmt: skip
    assert sampling_params(SAMPLING.settings()) == SamplingParams(
        max_tokens=5, min_tokens=1, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, n=2, stop=("a", "b"),
        stop_token_ids=(4,), include_stop=True, ignore_eos=True, repetition_penalty=1.1, presence_penalty=0.1,
        frequency_penalty=0.2, logit_bias={5: -1.5}, bad_words=("x",), logprobs=1, prompt_logprobs=2,
        skip_special_tokens=False, guide=Guide(kind="regex", text="a=b"),
    )  # fmt: skip


def test_what_is_not_given_is_left_to_the_defaults():
    assert EngineOptions().settings() == SamplingOptions().settings() == {}


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("500M", 500_000_000), ("2GiB", 2 << 30), ("1.5 kb", 1500), ("64KiB", 65536), ("1g", 10**9)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "1.2.3M", ".", "2TB", "-1M", "1 M iB"])
def test_odd_sizes_are_refused(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["attention", "=reference", "attention="])
def test_half_a_pair_is_refused(text):
    with pytest.raises(ValueError, match="--op takes NAME=VALUE"):
        EngineOptions(op=[text]).settings()
