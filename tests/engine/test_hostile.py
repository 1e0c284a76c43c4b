"""Bad input is refused by name, before anything runs, and nothing else is disturbed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx import LLM, AsyncLLM
from phalanx.config import ConfigError, engine_config
from phalanx.engine.build import build_engine
from phalanx.models import ModelConfigError
from tests.models.tiny import llama, llama_config
from tests.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "no prompts were given"),
        ([[]], {}, "no tokens"),
        ([[5], []], {}, "prompt 1: .*no tokens"),
        ([5, VOCAB_SIZE], {}, f"token id {VOCAB_SIZE} is outside the vocabulary of {VOCAB_SIZE}"),
        ([5, -3], {}, "token id -3 is outside"),
        ([[5, "x"]], {}, "token ids must be integers"),
        ([[5, True]], {}, "token ids must be integers"),
        (7, {}, "prompts must be texts or token ids, not int"),
        ([None], {}, "a prompt is a text or a list of token ids, not NoneType"),
        ([[5] * 252], {}, "the prompt has 252 tokens, with an answer the limit is 252"),
        ([[5] * 250], {"max_tokens": 3}, "250 tokens and max_tokens=3 are above the context of 252"),
        ([5], {"max_tokens": 0}, "max_tokens=0 asks for nothing"),
        ([5], {"max_tokens": -1}, "max_tokens: .*greater than or equal to 0"),
        ([5], {"max_tokens": 10**9}, "above the context"),
        ([5], {"max_tokens": 1.5}, "max_tokens: "),
        ([5], {"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is above max_tokens=8"),
        ([5], {"min_tokens": 5000}, "min_tokens=5000, but only"),
        ([5], {"temperature": -0.1}, "temperature: "),
        ([5], {"temperature": float("nan")}, "temperature: "),
        ([5], {"temperature": float("inf")}, "temperature: "),
        ([5], {"top_p": 0.0}, "top_p: "),
        ([5], {"top_p": 1.1}, "top_p: "),
        ([5], {"top_k": -1}, "top_k: "),
        ([5], {"min_p": 2}, "min_p: "),
        ([5], {"repetition_penalty": 0.0}, "repetition_penalty: "),
        ([5], {"frequency_penalty": 1e9}, "frequency_penalty: "),
        ([5], {"seed": -1}, "seed: "),
        ([5], {"seed": 2**63}, "seed: "),
        ([5], {"n": 0}, "n: "),
        ([5], {"n": 2}, "n=2 answers at temperature 0"),
        ([5], {"logprobs": 21}, "logprobs: "),
        ([5], {"logit_bias": {VOCAB_SIZE: 1.0}}, f"logit_bias: token id {VOCAB_SIZE} is outside"),
        ([5], {"logit_bias": {3: 101.0}}, "logit_bias goes from -100 to 100"),
        ([5], {"stop_token_ids": [-1]}, "stop_token_ids: token id -1 is outside"),
        ([5], {"stop": [""]}, "stop: .*an empty text is everywhere"),
        ([5], {"bad_words": [""]}, "bad_words: "),
        ([5], {"temprature": 1.0}, "temprature: unknown setting; did you mean temperature"),
        ([5], {"best_of": 2}, "best_of: unknown setting"),
    ],
)
def test_bad_requests_are_named_and_leave_nothing_behind(
    make_llm: Callable[..., LLM], prompt: Any, options: dict[str, Any], message: str
) -> None:
    llm = make_llm()
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt, **options)
    assert not llm.has_work
    assert len(llm.generate([5], max_tokens=2, ignore_eos=True)[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size: "),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: "),
        ({"dtype": "float8"}, "dtype: .*'float8' is not one of"),
        ({"num_blocks": 1}, "num_blocks: "),
        ({"num_blocks": 9, "kv_cache_memory": 10}, "num_blocks and kv_cache_memory both size the KV pool"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_seqs=9 is above max_num_batched_tokens=8"),
        ({"max_num_seqs": 9, "max_tracked_sequences": 8}, "max_tracked_sequences=8 is below max_num_seqs=9"),
        ({"memory_fraction": 1.5}, "memory_fraction: "),
        ({"loop": "eager"}, "loop: "),
        ({"blok_size": 8}, "blok_size: unknown setting; did you mean block_size"),
        ({"ops": {"attention": "flash9"}}, "flash9"),
        ({"ops": {"atention": "reference"}}, "atention"),
        pytest.param(
            {"device": "cuda"},
            "torch sees no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
        ),
        ({"kv_cache_memory": 10}, "a KV block takes .* bytes and 10 bytes are left"),
    ],
)
def test_bad_settings_are_named(tiny_folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_engine(tiny_folder, **settings)


def test_several_bad_settings_come_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        engine_config(block_size=-1, loop="x", nonsense=1)
    assert all(name in str(caught.value) for name in ("block_size", "loop", "nonsense"))


@pytest.mark.parametrize("model", ["no/such/model/anywhere", "./nowhere", "/does/not/exist"])
def test_a_model_that_is_not_there(model: str) -> None:
    with pytest.raises(ValueError, match="neither a"):
        LLM(model)


def test_a_folder_without_weights_and_one_without_config(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder, tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        LLM(tmp_path / "a")
    shutil.copytree(tiny_folder, tmp_path / "b")
    (tmp_path / "b" / "config.json").unlink()
    with pytest.raises(ModelConfigError, match=r"config.json does not exist"):
        LLM(tmp_path / "b")


@pytest.mark.parametrize("loop", ["plain", "async"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_weights_end_the_request_not_the_engine(
    tiny_folder: Path, tmp_path: Path, loop: str, temperature: float
) -> None:
    folder = tmp_path / "nan"
    shutil.copytree(tiny_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    # Only prompts with token 7 meet it.
    tensors["model.embed_tokens.weight"][7] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(folder, num_blocks=64, block_size=4, loop=loop)
    options = {"max_tokens": 6, "ignore_eos": True, "temperature": temperature, "seed": 1, "logprobs": 1}
    good = LLM(tiny_folder, num_blocks=64, block_size=4).generate([[5, 6, 8]], **options)[0].outputs[0]
    for _ in range(2):
        outputs = llm.generate([[5, 6, 8], [5, 6, 7, 8], [9, 10]], **options)
        assert outputs[0].outputs[0].token_ids == good.token_ids
        bad = outputs[1].outputs[0]
        assert (bad.finish_reason, bad.token_ids) == ("error", [])
        assert bad.error is not None and "not finite" in bad.error
        assert outputs[2].outputs[0].finish_reason == "length"
    llm.core.check_idle()


def test_nan_in_unused_slots_never_leaks(make_llm: Callable[..., LLM], prompts: list[list[int]]) -> None:
    clean = make_llm(num_blocks=100).generate(prompts, max_tokens=8)
    llm = make_llm(num_blocks=100)
    storage = llm.engine.runner.storage
    assert storage is not None
    storage.memory.view(torch.float32).fill_(float("nan"))
    assert [o.outputs for o in llm.generate(prompts, max_tokens=8)] == [o.outputs for o in clean]


def test_params_for_another_number_of_prompts(make_llm: Callable[..., LLM]) -> None:
    from phalanx import SamplingParams

    with pytest.raises(ValueError, match="2 sampling settings for 1 prompts"):
        make_llm().generate("hello", [SamplingParams(), SamplingParams()])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "a conversation without messages"),
        ([{"content": "hi"}], "a message is a dict with 'role'"),
        ([{"role": "alien", "content": "hi"}], "the chat template refuses these messages: .*unknown role alien"),
    ],
)
def test_bad_conversations(make_llm: Callable[..., LLM], messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_llm().chat(messages)


def test_a_model_without_tokenizer_takes_ids_only(tiny_folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_folder / name, tmp_path)
    llm = LLM(tmp_path, num_blocks=64)
    assert llm.generate([[5, 6]], max_tokens=2, ignore_eos=True)[0].outputs[0].text == ""
    for call in (lambda: llm.generate("hi"), lambda: llm.generate([[5]], stop="x")):
        with pytest.raises(ValueError, match="no tokenizer"):
            call()
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_bos_is_never_doubled(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    tokenizer = llm.tokenizer
    template = llm.chat([{"role": "user", "content": "hi"}], max_tokens=1)[0].prompt_token_ids
    assert template[0] == tokenizer.bos_token_id != template[1]
    assert template == tokenizer("<s>[user]hi[assistant]", add_special_tokens=False)["input_ids"]
    llm._maker.prompts.tokenizer = Adding(tokenizer)
    for text in ("hi", "<s>hi"):
        ids = llm.generate(text, max_tokens=1)[0].prompt_token_ids
        assert ids == tokenizer("<s>hi", add_special_tokens=False)["input_ids"]


class Adding:
    """A tokenizer that puts BOS before every text, as Llama's does."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos_token_id

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return {"input_ids": [self.bos_token_id, *ids] if add_special_tokens else ids}


def test_an_engine_that_fails_says_so_to_everybody(tiny_folder: Path) -> None:
    import asyncio

    from phalanx.engine.async_llm import EngineDead

    async def main() -> None:
        llm = AsyncLLM(tiny_folder, num_blocks=64, block_size=4)
        llm.llm.engine.model.forward_mlp = lambda *args: 1 / 0  # type: ignore[method-assign, assignment]
        found = await asyncio.gather(*(llm.generate([5, k], max_tokens=4) for k in (6, 7)), return_exceptions=True)
        assert all(isinstance(error, EngineDead) and "division by zero" in str(error) for error in found)
        with pytest.raises(EngineDead):
            await llm.generate([5], max_tokens=4)
        llm.close()

    asyncio.run(main())


def test_a_closed_engine_says_so_and_keeps_no_memory(tiny_folder: Path) -> None:
    import gc
    import weakref

    llm = LLM(tiny_folder, num_blocks=64)
    storage = llm.engine.runner.storage
    assert storage is not None
    gc.disable()
    try:
        gone = [weakref.ref(storage.memory), weakref.ref(llm.engine.model.layers[0].mlp_2.data)]
        del storage
        llm.close()
        llm.close()
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()
    for call in (lambda: llm.generate("hi"), lambda: llm.stream("hi"), llm.step, lambda: llm.add_request("hi")):
        with pytest.raises(RuntimeError, match="this engine is closed"):
            call()
    engine = build_engine(tiny_folder, num_blocks=64)
    engine.close()
    with pytest.raises(RuntimeError, match="this engine is closed"):
        engine.put([0], [[5]])


def test_ids_without_logits_never_come_and_end_nothing() -> None:
    config = llama_config(vocab_size=200, max_position_embeddings=256, eos_token_id=400)
    llm = LLM(llama(config), tokenizer=tiny_tokenizer(), num_blocks=64)
    options = {"min_tokens": 2, "bad_words": ["hell"], "logprobs": 20, "prompt_logprobs": 20}
    output = llm.generate([5, 6, 7], max_tokens=4, **options)[0]
    assert len(output.outputs[0].token_ids) == 4
    small = LLM(llama(llama_config(vocab_size=16)), num_blocks=64)
    logprobs = small.generate([5, 6, 7], max_tokens=2, logprobs=20)[0].outputs[0].logprobs
    assert logprobs is not None and len(logprobs[0]) == 16


@pytest.mark.parametrize("temperature", [1e-39, 1e-30, 1e-6])
def test_a_temperature_near_0_gives_the_likeliest_tokens(make_llm: Callable[..., LLM], temperature: float) -> None:
    llm = make_llm()
    greedy = llm.generate([5, 6, 7], max_tokens=8)[0].outputs[0].token_ids
    assert llm.generate([5, 6, 7], max_tokens=8, temperature=temperature, top_p=0.9)[0].outputs[0].token_ids == greedy


def test_half_a_character_is_named(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    for call in (
        lambda: llm.generate("\ud800"),
        lambda: llm.generate("hi", bad_words=["\ud800"]),
        lambda: llm.chat([{"role": "user", "content": "\ud800"}]),
    ):
        with pytest.raises(ValueError, match="half a character"):
            call()


@pytest.mark.parametrize("loop", ["plain", "async"])
def test_a_step_that_is_broken_off_lets_nobody_wait(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    llm = make_llm(loop=loop)
    stream = llm.stream([5, 6], max_tokens=30, ignore_eos=True)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.core.kv, "commit", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            llm.generate([7, 8], max_tokens=5)
    last = list(stream)[-1]
    assert last.finish_reason == "error" and last.error is not None and "KeyboardInterrupt" in last.error
    llm.core.check_idle()
    assert len(llm.generate([7, 8], max_tokens=5, ignore_eos=True)[0].outputs[0].token_ids) == 5


def test_a_stream_that_nobody_reads_costs_nothing(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    llm.stream([5, 6])
    assert not llm.has_work
    with pytest.raises(ValueError, match="outside the vocabulary"):
        llm.stream([10**6])


def test_the_sequences_of_an_llm_are_its_own(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(RuntimeError, match="belong to an LLM"):
        make_llm().engine.put([0], [[5]])


def test_an_end_tokens_text_is_part_of_the_answer_only_if_asked(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    free = llm.generate([5, 6, 7], max_tokens=6, ignore_eos=True)[0].outputs[0].token_ids
    end = {"stop_token_ids": [free[3]], "max_tokens": 6, "ignore_eos": True}
    first = free.index(free[3])
    for include, count in ((False, first), (True, first + 1)):
        output = llm.generate([5, 6, 7], include_stop=include, **end)[0].outputs[0]
        assert output.token_ids == free[: first + 1]
        assert output.text == llm.tokenizer.decode(free[:count])
