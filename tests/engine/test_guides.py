"""Guided answers look like what was asked for, whatever runs beside them, and change nothing of it."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from phalanx import LLM, Guide, SamplingParams
from phalanx.config import ConfigError
from phalanx.distributed.thread_group import run_threads
from phalanx.engine.decode import DecodeStep
from phalanx.engine.guide_limits import MAX_BYTES
from phalanx.engine.guides import GuideCompiler, GuideMatcher, token_masks
from phalanx.engine.outputs import RequestOutput
from tests.engine.random_schemas import random_schema
from tests.tiny_tokenizer import tiny_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["x", "y"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
DATES = 'start: year "-" month\nyear: /[0-9]{4}/\nmonth: "0" /[1-9]/ | "1" /[0-2]/'
GUIDES = [
    Guide(kind="json_schema", text=json.dumps(SCHEMA)),
    Guide(kind="regex", text="[a-f]{3,9}"),
    Guide(kind="choice", text='["yes", "no", "maybe so"]'),
    Guide(kind="grammar", text=DATES),
]


def fits(guide: Guide, text: str) -> bool:
    if guide.kind == "json_schema":
        return jsonschema.Draft202012Validator(json.loads(guide.text)).is_valid(json.loads(text))
    if guide.kind == "choice":
        return text in json.loads(guide.text)
    return re.fullmatch(guide.text if guide.kind == "regex" else r"\d{4}-(0[1-9]|1[0-2])", text) is not None


def params_of(place: int, guide: Guide | None) -> SamplingParams:
    temperature = 0.0 if place % 3 == 0 else 0.9
    return SamplingParams(max_tokens=90 if guide else 30, temperature=temperature, seed=place, guide=guide, logprobs=1)


def mixed() -> list[SamplingParams]:
    """Guided and free requests in turns."""
    return [params_of(place, GUIDES[place // 2 % len(GUIDES)] if place % 2 else None) for place in range(12)]


def ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.mark.parametrize("loop", ["plain", "async"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_kind_gives_answers_that_fit(make_llm: Callable[..., LLM], loop: str, temperature: float) -> None:
    llm = make_llm(loop=loop)
    for seed in range(3):
        params = [SamplingParams(temperature=temperature, seed=seed, guide=guide, max_tokens=90) for guide in GUIDES]
        for guide, output in zip(GUIDES, llm.generate(["hello"] * len(GUIDES), params), strict=True):
            assert output.outputs[0].finish_reason == "stop", output
            assert fits(guide, output.text), output.text


def test_any_object(make_llm: Callable[..., LLM]) -> None:
    output = make_llm().generate("hello", guide={"kind": "json_object"}, max_tokens=120, temperature=1.0, seed=4)[0]
    if output.outputs[0].finish_reason == "stop":
        assert isinstance(json.loads(output.text), dict)
    else:
        assert output.text.startswith("{")


@pytest.mark.parametrize("loop", ["plain", "async"])
@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_free_requests_beside_guided_ones_are_what_they_are_alone(
    make_llm: Callable[..., LLM], prompts: list[list[int]], loop: str, fixed_shapes: bool
) -> None:
    # float64: where kernels depend on the batch, rounding could move a draw across the border of two tokens.
    llm = make_llm(loop=loop, num_blocks=400, dtype="float64", cuda_graphs=False)
    params = mixed()
    alone = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    if fixed_shapes:
        runner = llm.engine.runner
        runner.decode = DecodeStep(runner.model, runner.tokens, runner.block_tables, runner.staging, [1, 4, 12])
    together = llm.generate(prompts, params)
    assert ids(together) == ids(alone)
    for one, output in zip(params, together, strict=True):
        assert one.guide is None or fits(one.guide, output.text)
    for one, other in zip(together, alone, strict=True):
        for mine, its in zip(one.outputs[0].logprobs or [], other.outputs[0].logprobs or [], strict=True):
            assert mine == pytest.approx(its)


def test_logprobs_are_those_of_the_model_not_of_the_mask(make_llm: Callable[..., LLM]) -> None:
    output = make_llm().generate([[40, 41]], guide=GUIDES[1], logprobs=3)[0].outputs[0]
    free = make_llm().generate([[40, 41]], max_tokens=1, logprobs=3)[0].outputs[0]
    assert output.logprobs is not None and free.logprobs is not None
    # The likeliest are the same, allowed or not.
    assert free.logprobs[0].items() <= output.logprobs[0].items()


@pytest.mark.parametrize("loop", ["plain", "async"])
def test_ranks_draw_alike(loop: str, tiny_folder: Path, prompts: list[list[int]]) -> None:
    settings: dict[str, Any] = {"num_blocks": 400, "block_size": 4, "loop": loop, "dtype": "float64"}
    expected = LLM(tiny_folder, **settings).generate(prompts, mixed())

    def run(group: Any) -> list[RequestOutput]:
        return LLM(tiny_folder, group=group, tensor_parallel_size=2, **settings).generate(prompts, mixed())

    found = run_threads(2, run)
    assert ids(found[0]) == ids(found[1]) == ids(expected)


@pytest.mark.slow
def test_ranks_in_processes_draw_alike(tiny_folder: Path, prompts: list[list[int]]) -> None:
    settings: dict[str, Any] = {"num_blocks": 400, "block_size": 4, "dtype": "float64"}
    expected = LLM(tiny_folder, **settings).generate(prompts, mixed())
    with LLM(tiny_folder, tensor_parallel_size=2, loop="async", **settings) as llm:
        assert ids(llm.generate(prompts, mixed())) == ids(expected)


@pytest.mark.parametrize("loop", ["plain", "async"])
def test_answers_to_one_prompt_have_a_matcher_each(make_llm: Callable[..., LLM], loop: str) -> None:
    output = make_llm(loop=loop).generate([list(range(10, 30))], guide=GUIDES[0], n=5, temperature=1.0, seed=1)[0]
    texts = [one.text for one in output.outputs]
    assert all(fits(GUIDES[0], text) for text in texts) and len(set(texts)) > 1


@pytest.mark.parametrize("loop", ["plain", "async"])
@pytest.mark.parametrize("budget", [5, 16])
def test_preemption_changes_nothing(
    make_llm: Callable[..., LLM], prompts: list[list[int]], loop: str, budget: int
) -> None:
    roomy = make_llm(num_blocks=400, dtype="float64")
    expected = ids(roomy.generate(prompts, mixed()))
    llm = make_llm(loop=loop, num_blocks=34, max_num_batched_tokens=budget, max_num_seqs=5, dtype="float64")
    assert ids(llm.generate(prompts, mixed())) == expected
    assert llm.core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("loop", ["plain", "async"])
def test_an_aborted_one_leaves_the_others(make_llm: Callable[..., LLM], loop: str) -> None:
    llm = make_llm(loop=loop)
    names = [llm.add_request([40, 41, 42], params_of(place, GUIDES[0])) for place in range(3)]
    groups = [llm.group_of(name) for name in names]
    for _ in range(4):
        llm.step()
    llm.abort(names[1])
    while llm.has_work:
        llm.step()
    reasons = [group.output().outputs[0].finish_reason for group in groups]
    assert reasons == ["stop", "abort", "stop"]


def test_the_stream_is_the_answer(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(loop="async")
    whole = llm.generate("hello", guide=GUIDES[0])[0].text
    assert "".join(chunk.text for chunk in llm.stream("hello", guide=GUIDES[0])) == whole and fits(GUIDES[0], whole)


@pytest.mark.parametrize("loop", ["plain", "async"])
def test_other_settings_hold_too(make_llm: Callable[..., LLM], loop: str) -> None:
    llm = make_llm(loop=loop)
    letters = {letter: llm.tokenizer.convert_tokens_to_ids(letter) for letter in "abcdef"}

    def answer(**settings: Any) -> Any:
        return llm.generate("hello", guide=GUIDES[1], **settings)[0].outputs[0]

    assert set(answer(logit_bias={letters["c"]: 100.0}, ignore_eos=True).text) == {"c"}
    assert "c" not in answer(bad_words="c", logit_bias={letters["c"]: 100.0}).text
    different = answer(repetition_penalty=50.0).text
    assert len(set(different)) == len(different)
    assert answer(temperature=1.0, seed=3).text == answer(temperature=1.0, seed=3).text
    assert len(answer(min_tokens=8).text) >= 8
    long = answer(ignore_eos=True)
    assert (len(long.text), long.finish_reason) == (9, "stop")
    cut = answer(max_tokens=2)
    assert (len(cut.text), cut.finish_reason) == (2, "length")
    stopped = answer(stop="c", logit_bias={letters["c"]: 100.0})
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("", "stop", "c")
    # What is complete ends, whatever min_tokens says.
    done = llm.generate("hello", guide=GUIDES[2], min_tokens=60)[0].outputs[0]
    assert done.finish_reason == "stop" and fits(GUIDES[2], done.text)


@pytest.mark.parametrize("loop", ["plain", "async"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_nothing_can_come_only_that_request_fails(
    make_llm: Callable[..., LLM], loop: str, temperature: float
) -> None:
    llm = make_llm(loop=loop, dtype="float64")
    alone = llm.generate("hello", max_tokens=10)[0]
    settings = [
        SamplingParams(guide=Guide(kind="choice", text='["ab"]'), bad_words="b", temperature=temperature),
        SamplingParams(max_tokens=10),
        SamplingParams(guide=GUIDES[0], temperature=temperature),
    ]
    failed, free, guided = llm.generate(["hello"] * 3, settings)
    assert failed.outputs[0].finish_reason == "error" and failed.outputs[0].error is not None
    assert "guide, logit_bias, bad_words and min_tokens together allow none" in failed.outputs[0].error
    assert free.outputs == alone.outputs and fits(GUIDES[0], guided.text)


@pytest.mark.parametrize("loop", ["plain", "async"])
def test_a_guide_that_breaks_while_it_runs_ends_its_own_request(make_llm: Callable[..., LLM], loop: str) -> None:
    # Compiles, and has too many parses behind the first character.
    rules = "\n".join(f"a{place}: a{place + 1} a{place + 1}" for place in range(25))
    ambiguous = Guide(kind="grammar", text=f'start: a0\n{rules}\na25: "x"')
    llm = make_llm(loop=loop)
    broken, guided = llm.generate(["hello"] * 2, [SamplingParams(guide=ambiguous), SamplingParams(guide=GUIDES[0])])
    assert broken.outputs[0].finish_reason == "error"
    assert broken.outputs[0].error is not None and "the guide cannot go on: " in broken.outputs[0].error
    assert fits(GUIDES[0], guided.text)


@pytest.mark.parametrize("loop", ["plain", "async"])
def test_answers_to_random_schemas_validate(make_llm: Callable[..., LLM], loop: str) -> None:
    schemas = [random_schema(seed) for seed in range(20)]
    llm = make_llm(loop=loop, num_blocks=3000, max_model_len=2500, max_num_seqs=20)
    settings = [
        SamplingParams(guide={"kind": "json_schema", "text": schema}, temperature=1.0, seed=place)
        for place, schema in enumerate(schemas)
    ]
    for schema, output in zip(schemas, llm.generate([[40 + place] for place in range(20)], settings), strict=True):
        assert output.outputs[0].finish_reason == "stop", output.outputs[0]
        jsonschema.Draft202012Validator(schema).validate(json.loads(output.text))


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["plain", "async"])
def test_smollm2_answers_to_random_schemas_validate_beside_free_requests(loop: str) -> None:
    llm = LLM("smollm2", loop=loop, max_model_len=2048, num_blocks=2000, max_num_seqs=16)
    schemas = [random_schema(seed) for seed in range(100)]
    prompts = [f"An example of JSON for the schema {json.dumps(schema)[:200]}:\n" for schema in schemas]
    free = SamplingParams(max_tokens=24)
    expected = [output.outputs for output in llm.generate(prompts[:10], free)]
    settings = [
        SamplingParams(guide={"kind": "json_schema", "text": schema}, temperature=place % 3 / 2, seed=place)
        for place, schema in enumerate(schemas)
    ]
    outputs = llm.generate(prompts + prompts[:10], settings + [free] * 10)
    for schema, output in zip(schemas, outputs, strict=False):
        assert output.outputs[0].finish_reason == "stop", output
        jsonschema.Draft202012Validator(schema).validate(json.loads(output.text))
    assert [output.outputs for output in outputs[100:]] == expected
    llm.close()


# -- the compiler


def allowed(matcher: GuideMatcher, vocab_size: int) -> set[int]:
    masks = token_masks([matcher], vocab_size)
    assert masks.shape == (1, -(-vocab_size // 32)) and masks.dtype == np.int32
    bits = np.unpackbits(np.ascontiguousarray(masks).view(np.uint8)[0], bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece makes them: a few pieces, words that begin with a mark, bytes for the rest."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "▁", "▁yes", "y", "e", "s", "é"]
    model = models.BPE({piece: place for place, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in pieces[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def test_ids_that_only_the_model_has_and_special_tokens_never_come() -> None:
    tokenizer = tiny_tokenizer()
    compiler = GuideCompiler(tokenizer, 300, {2, 290})
    everything = allowed(compiler.compile(Guide(kind="regex", text="(?s:.)*")).matcher(), 300)
    assert everything and max(everything) < len(tokenizer) and not everything & {0, 1} and 2 in everything
    # Fewer logits than tokens: the mask ends with the logits.
    assert max(allowed(compiler.compile(Guide(kind="regex", text="(?s:.)*")).matcher(), 100)) < 128


def test_end_tokens_come_only_where_the_guide_accepts() -> None:
    tokenizer = tiny_tokenizer()
    guide = Guide(kind="regex", text="ab?")
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    compiler = GuideCompiler(tokenizer, 263, {2, 5})
    matcher, goes_on = compiler.compile(guide).matcher(), compiler.compile(guide).matcher(ends_allowed=False)
    assert allowed(matcher, 263) == allowed(goes_on, 263) == {a}
    matcher.advance(a)
    goes_on.advance(a)
    assert allowed(matcher, 263) == {b, 2, 5} and allowed(goes_on, 263) == {b} and not matcher.complete
    matcher.advance(b)
    assert matcher.complete and matcher.error is None
    matcher.advance(b)
    assert matcher.error is not None and not matcher.complete


def test_tokens_for_single_bytes_spell_what_has_no_token() -> None:
    tokenizer = byte_fallback_tokenizer()
    matcher = GuideCompiler(tokenizer).compile(Guide(kind="choice", text='["é日", "yes"]')).matcher()
    names = {tokenizer.convert_ids_to_tokens(token) for token in allowed(matcher, len(tokenizer))}
    assert names == {"y", "<0x79>", "é", "<0xC3>"}
    answer = tokenizer.convert_tokens_to_ids(["<0xC3>", "<0xA9>", "<0xE6>", "<0x97>", "<0xA5>"])
    for token in answer:
        assert token in allowed(matcher, len(tokenizer))
        matcher.advance(token)
    assert matcher.complete and tokenizer.decode(answer) == "é日"


def test_a_tokenizer_without_an_end_ends_what_is_complete() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    matcher = GuideCompiler(tokenizer).compile(Guide(kind="choice", text='["a", "aa"]')).matcher()
    a = tokenizer.convert_tokens_to_ids("a")
    matcher.advance(a)
    assert allowed(matcher, 263) == {a}
    matcher.advance(a)
    assert matcher.complete


def test_whitespace_is_bounded() -> None:
    tokenizer = tiny_tokenizer()
    matcher = GuideCompiler(tokenizer).compile(Guide(kind="json_object")).matcher()
    for token in tokenizer.encode('{ "a" : [ 1, 2 ], "b":"x"', add_special_tokens=False):
        matcher.advance(token)
    assert matcher.error is None
    for token in tokenizer.encode("  ", add_special_tokens=False):
        matcher.advance(token)
    assert matcher.error is not None
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": r"\s+"}}
    loose = GuideCompiler(tokenizer).compile(Guide(kind="json_schema", text=schema)).matcher()
    for token in tokenizer.encode("{   \n  }", add_special_tokens=False):
        loose.advance(token)
    assert loose.error is None and loose.complete


@pytest.mark.parametrize("loop", ["plain", "async"])
def test_a_guide_may_begin_after_a_text(make_llm: Callable[..., LLM], loop: str) -> None:
    llm = make_llm(loop=loop)
    z = llm.tokenizer.convert_tokens_to_ids("z")
    guide = GUIDES[2].model_copy(update={"after": "zz"})
    free = llm.generate("hello", max_tokens=40, ignore_eos=True, logit_bias={z: 3.0})[0].outputs[0]
    place = free.text.index("zz") + 2
    output = llm.generate("hello", guide=guide, logit_bias={z: 3.0})[0].outputs[0]
    # Free as far as that, the end tokens forbidden.
    assert (output.text[:place], output.finish_reason) == (free.text[:place], "stop")
    assert fits(GUIDES[2], output.text[place:])


def deep(levels: int) -> str:
    return '{"properties":{"a":' * levels + "{}" + "}}" * levels


CHAIN = "start: a0\n" + "\n".join(f"a{place}: a{place + 1}" for place in range(9000)) + '\na9000: "x"'


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "(a", "the regular expression cannot be used: .*unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", "(" * 60000 + "a" + ")" * 60000, "the regular expression cannot be used"),
        ("grammar", "start: foo", 'the grammar cannot be used: .*unknown name: "foo"'),
        ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
        (
            "grammar",
            "start: A\nA: " + " & ".join(f"/.*a{n}.*/" for n in range(30)),
            "8 of the operators & and ~, given 29",
        ),
        ("grammar", "start: %json {", "not followed by JSON"),
        ("grammar", "start: %json " + deep(40), "nested too deep"),
        ("json_schema", "{", "the JSON schema is not JSON"),
        ("json_schema", "[]", "a JSON schema is an object"),
        ("json_schema", deep(40), "nested too deep"),
        ("json_schema", deep(5000), "nested too deep"),
        ("json_schema", '{"$ref": "#"}', "no text satisfies it"),
        ("json_schema", '{"$ref": "http://localhost/x"}', "the JSON schema cannot be used"),
        ("json_schema", '{"type": "string", "not": {"const": "a"}}', r'Unimplemented keys: \["not"\]'),
        ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}', "minLength"),
        ("json_schema", {"properties": {f"p{n}": {} for n in range(1001)}}, "1001 members: 1000 are allowed"),
        ("json_schema", {"allOf": [{"pattern": f".*a{n}.*"} for n in range(30)]}, "may have 8 patterns, given 30"),
        ("choice", "[1]", "a choice is a list of texts"),
        ("choice", "[]", "a choice is a list of texts"),
        ("choice", '{"a": 1}', "a choice is a list of texts"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_reason(kind: Any, text: Any, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match=message):
        GuideCompiler(tiny_tokenizer()).compile(Guide(kind=kind, text=text))
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "guide",
    [
        Guide(kind="grammar", text=CHAIN),
        Guide(kind="regex", text="(a*)*b|(a|a)*(a|aa)+"),
        Guide(kind="regex", text="((a{1,100}){1,100}){1,100}"),
        Guide(kind="regex", text=".*a.{20}"),
        Guide(kind="json_schema", text={"enum": [f"value {n}" for n in range(5000)]}),
        Guide(kind="json_schema", text={"type": "string", "maxLength": 10**7}),
        Guide(kind="json_schema", text={"type": "array", "minItems": 10**5, "items": {"type": "null"}}),
        Guide(
            kind="json_schema",
            text='{"$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}',
        ),
    ],
    ids=lambda guide: guide.text[:20],
)
def test_large_ones_within_the_bounds_work(guide: Guide) -> None:
    matcher = GuideCompiler(tiny_tokenizer()).compile(guide).matcher()
    for _ in range(5):
        tokens = allowed(matcher, 263) - {2}
        if not tokens or matcher.complete:
            break
        matcher.advance(min(tokens))
        assert matcher.error is None


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        ({"kind": "xml", "text": "a"}, "kind"),
        ({"kind": "regex"}, "needs a text"),
        ({"kind": "json_object", "text": "{}"}, "takes no text"),
        ({"kind": "regex", "text": "a" * (MAX_BYTES + 1)}, "may have 131072 bytes"),
        ({"kind": "regex", "text": "\ud800"}, "half a character"),
        ({"kind": "regex", "text": "a", "more": 1}, "more"),
    ],
)
def test_malformed_guides_are_refused_as_settings(
    make_llm: Callable[..., LLM], guide: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm().generate("hello", guide=guide)


def test_a_bad_guide_is_refused_before_anything_runs(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ValueError, match="prompt 1: the regular expression cannot be used"):
        make_llm().generate(["a", "b"], [SamplingParams(), SamplingParams(guide=Guide(kind="regex", text="("))])


def test_without_llguidance_the_message_says_what_to_install(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(ValueError, match=r"pip install 'phalanx\[guides\]'"):
        make_llm().generate("hello", guide=GUIDES[0])


def test_compiled_guides_are_kept() -> None:
    compiler = GuideCompiler(tiny_tokenizer())
    assert compiler.compile(GUIDES[0]) is compiler.compile(Guide(**GUIDES[0].model_dump()))
