"""The figures of a load, against numbers that were worked out elsewhere."""

import itertools
import json
import random
import statistics
from array import array
from xml.etree import ElementTree

import pytest

from phalanx.bench.serving.arrivals import arrivals
from phalanx.bench.serving.client import Record
from phalanx.bench.serving.figures import figures, meets, parse_objectives, per_request, percentiles, warnings
from phalanx.bench.serving.load import Measured
from phalanx.bench.serving.picture import round_up, svg
from phalanx.bench.serving.requests import Shape, Synthetic, read_dataset
from phalanx.bench.serving.sse import EventReader


def record(sent, events, end, prompt_tokens=10, output_tokens=4, **fields):
    return Record(
        sent, end, events=array("d", events), prompt_tokens=prompt_tokens, output_tokens=output_tokens, **fields
    )


# Sent at 100, 101, 102: TTFT 200, 100, 600 ms.
FIRST = record(100.0, [100.2, 100.3, 100.5, 100.8], 100.9)  # 4 tokens in 4 events: TPOT 200 ms
SECOND = record(101.0, [101.1, 101.4], 101.5, prompt_tokens=20, output_tokens=7)  # 7 in 2 events: TPOT 50 ms
SINGLE = record(102.0, [102.6], 102.6, prompt_tokens=5, output_tokens=1)  # no TPOT
REFUSED = record(102.0, [], 102.1, None, None, error="HTTP 429", message="full")
CUT = record(103.0, [103.1], 103.4, None, None, interrupted=True)


def measured(*records, **fields):
    return Measured(begun=100.0, ended=104.0, records=list(records), **fields)


def test_figures_of_a_small_load():
    found = figures(measured(FIRST, SECOND, SINGLE, REFUSED, CUT, stopped=True), {"ttft": 0.25, "tpot": 0.1})
    assert found["requests"] == {"completed": 3, "failed": 1, "interrupted": 1} and found["stopped"]
    assert found["errors"] == [{"kind": "HTTP 429", "count": 1, "example": "full"}]
    assert (found["prompt_tokens"], found["output_tokens"]) == (35, 12)
    # 3 answers, 12 and 47 tokens in 4 s.
    assert (found["requests_per_s"], found["output_tok_per_s"], found["total_tok_per_s"]) == (0.75, 3.0, 11.75)
    assert found["ttft_ms"]["p50"] == pytest.approx(200) and found["ttft_ms"]["mean"] == pytest.approx(300)
    # Gaps: 100, 200, 300 and 300 ms.
    assert found["itl_ms"]["mean"] == pytest.approx(225) and found["itl_ms"]["p50"] == pytest.approx(250)
    assert found["tpot_ms"]["mean"] == pytest.approx(125) and found["tpot_ms"]["max"] == pytest.approx(200)
    assert found["e2e_ms"]["max"] == pytest.approx(900)
    # Only the second meets both: the first has 200 ms a token, the single token came late, one was refused.
    assert found["goodput"]["requests_per_s"] == 0.25 and found["goodput"]["share"] == 0.25
    rows = per_request(measured(SECOND, FIRST))
    assert [row["sent_s"] for row in rows] == [0.0, 1.0] and rows[0]["event_s"] == [0.2, 0.3, 0.5, 0.8]


def test_percentiles_are_numpys():
    # numpy.percentile([15, 20, 35, 40, 50], (50, 90, 95, 99)) is 35, 46, 48, 49.6.
    values = [0.015, 0.020, 0.035, 0.040, 0.050]
    expected = {"mean": 32.0, "max": 50.0, "p50": 35.0, "p90": 46.0, "p95": 48.0, "p99": 49.6}
    assert percentiles(values[::-1]) == expected
    assert percentiles([]) is None


def test_goodput_counts_what_is_missing_as_in_time():
    assert meets(SINGLE, {"tpot": 0.001}) and not meets(SINGLE, {"ttft": 0.5}) and meets(SINGLE, {"ttft": 0.7})
    assert not meets(REFUSED, {"ttft": 9.0})
    assert meets(FIRST, {"e2e": 1.0}) and not meets(FIRST, {"e2e": 0.8})


def test_tokens_that_are_not_counted_are_not_made_up():
    found = figures(measured(FIRST, record(101, [101.5], 102.0, None, None)), {})
    assert found["output_tokens"] is None and found["total_tok_per_s"] is None and found["goodput"] is None
    assert "does not count tokens" in warnings(found)[0]


def test_a_client_that_was_late_says_so():
    found = figures(measured(FIRST, lags=[0.001] * 50 + [0.2] * 50), {})
    assert "noticed what came late (p99 200 ms" in warnings(found)[0]
    assert not warnings(figures(measured(FIRST, lags=[0.001] * 50), {}))


def test_objectives():
    assert parse_objectives("ttft:200ms, tpot:50ms,e2e:2.5s") == {"ttft": 0.2, "tpot": 0.05, "e2e": 2.5}


@pytest.mark.parametrize("text", ["", "ttft", "ttft:200", "itl:3ms", "ttft:1ms,ttft:2ms", "ttft:-1ms", "ttft:1 ms"])
def test_odd_objectives_are_refused(text):
    with pytest.raises(ValueError, match="is no objective"):
        parse_objectives(text)


@pytest.mark.parametrize("burstiness", [1.0, 4.0, 0.25])
def test_arrivals_have_the_rate_and_the_spread_that_were_asked_for(burstiness):
    times = list(itertools.islice(arrivals(20.0, burstiness, seed=1), 20_001))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0 and min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    # The coefficient of variation of a gamma distribution is 1 / sqrt(shape): 1 for a Poisson process.
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)
    assert times[:50] == list(itertools.islice(arrivals(20.0, burstiness, seed=1), 50))


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (1, 0), (float("nan"), 1)])
def test_odd_rates_are_refused(rate, burstiness):
    with pytest.raises(ValueError, match="above 0"):
        arrivals(rate, burstiness, 0)


STREAM = ': hi\r\n\r\ndata: {"a": "é🙂"}\n\nevent: x\ndata:one\rdata: two\r\r\ndata: [DONE]\r\n\r\n'.encode()


def test_events_do_not_depend_on_how_their_bytes_are_cut():
    expected = ['{"a": "é🙂"}'.encode(), b"one\ntwo", b"[DONE]"]
    chance = random.Random(0)
    for _ in range(200):
        reader, cuts = EventReader(), sorted(chance.choices(range(len(STREAM)), k=chance.randrange(30)))
        found = [data for a, b in itertools.pairwise([0, *cuts, len(STREAM)]) for data in reader.push(STREAM[a:b])]
        assert found == expected


SHAPE = Shape("m", "completions", range(3, 6), extra={"temperature": 0}, seed=4)


def test_synthetic_prompts_share_prefixes():
    bodies = list(itertools.islice(Synthetic(range(2, 5), 50, 8, 3).requests(SHAPE), 100))
    assert bodies == list(itertools.islice(Synthetic(range(2, 5), 50, 8, 3).requests(SHAPE), 100))
    assert len({tuple(body["prompt"][:8]) for body in bodies}) == 3
    assert {len(body["prompt"]) for body in bodies} == {10, 11, 12} and {b["max_tokens"] for b in bodies} == {3, 4, 5}
    assert {token for body in bodies for token in body["prompt"]} == set(range(50))
    assert bodies[0] | {"prompt": 0, "max_tokens": 0} == {
        "model": "m",
        "prompt": 0,
        "max_tokens": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    chat = next(Synthetic(range(7, 8), None).requests(Shape("m", "chat", range(1, 2), ignore_eos=True)))
    assert len(chat["messages"][0]["content"].split()) == 7 and chat["ignore_eos"] is True


def test_a_dataset_is_read_over_and_over(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 9}\n\n{"prompt": [1, 2]}\n')
    first, second, third = itertools.islice(read_dataset(file, SHAPE).requests(SHAPE), 3)
    assert (first["prompt"], first["max_tokens"], third) == ("a", 9, first)
    assert second["prompt"] == [1, 2] and second["max_tokens"] in (3, 4, 5)
    shape = Shape("m", "chat", range(1, 2))
    file.write_text('{"messages": [{"role": "user", "content": "b\u2028"}]}\r\n{"prompt": "c"}', encoding="utf-8")
    first, second = itertools.islice(read_dataset(file, shape).requests(shape), 2)
    assert first["messages"][0]["content"] == "b\u2028" and second["messages"] == [{"role": "user", "content": "c"}]
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"data\.jsonl is no text in UTF-8"):
        read_dataset(file, shape)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ("[]", "either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "either prompt or messages"),
        ('{"prompt": 5}', "a prompt is a text"),
        ('{"messages": []}', "for --endpoint chat"),
        ('{"prompt": "a", "top_k": 3}', r"unknown fields \['top_k'\]"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
    ],
)
def test_odd_datasets_are_refused(tmp_path, line, message):
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"prompt": "fine"}) + "\n" + line)
    with pytest.raises(ValueError, match=message):
        read_dataset(file, SHAPE)


@pytest.mark.parametrize("records", [(), (REFUSED,), (FIRST, SECOND, SINGLE, REFUSED, CUT)])
def test_a_picture_is_an_svg_whatever_was_measured(records):
    drawn = svg(measured(*records), "<model>: a & b", "told")
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.text]
    assert "<model>: a & b" in texts and "Time to first token, ms" in texts


@pytest.mark.parametrize(("value", "rounded"), [(0.03, 0.05), (1, 1), (1.1, 2), (2.1, 5), (5.1, 10), (70, 100)])
def test_rounding_up(value, rounded):
    assert round_up(value) == pytest.approx(rounded)
