"""The page at ``/``, driven by Chromium."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.server.page_stub import DONE, PAGE, Stub, delta, event, token

CHROMIUM = Path("/usr/bin/chromium")

playwright = pytest.importorskip("playwright.sync_api", reason="the page is driven by playwright, which is missing")
if not CHROMIUM.exists():
    pytest.skip(f"the page is driven by Chromium, and {CHROMIUM} is missing", allow_module_level=True)
expect = playwright.expect


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def stub():
    stub = Stub()
    yield stub
    stub.close()


@pytest.fixture
def page(browser, stub):
    """The page of the stub, opened; a script error or an outside request fails the test."""
    with browser.new_context(viewport={"width": 1280, "height": 800}, permissions=["clipboard-write"]) as context:
        page = context.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith((stub.url, "data:")) or faults.append(asked.url))
        page.goto(stub.url)
        yield page
        assert not faults


def ask(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


@pytest.mark.xdist_group("server")
def test_with_a_real_server(browser, server):
    """Its own policy of what may run included, which is stricter than the stub's."""
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        page = context.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: said.type == "error" and faults.append(said.text))
        sent: list[dict] = []
        page.on("request", lambda asked: asked.method == "POST" and sent.append(asked.post_data_json))
        page.goto(server.url)
        expect(page.get_by_label("Model", exact=True)).to_have_value("tiny")
        expect(page.locator("#state")).to_have_text("ready")
        top = page.locator("#chart-throughput div span").first
        expect(top).to_have_text("top 1")
        for label, value in {"Temperature": "0", "Max tokens": "40", "Seed": "3", "Repetition penalty": "1.1"}.items():
            page.get_by_label(label).fill(value)
        page.get_by_label("Show them in the next answers").check()
        ask(page, "Hello")
        expect(page.locator("article.assistant .foot")).to_contain_text("tokens")
        asked = sent[-1]
        assert (asked["temperature"], asked["max_tokens"], asked["repetition_penalty"]) == (0, 40, 1.1)
        # The same request without a page: the same text, and the same probabilities.
        plain = server.http.post("/v1/chat/completions", json={**asked, "stream": False, "stream_options": None}).json()
        choice = plain["choices"][0]
        tokens = page.locator("article.assistant .token")
        shown = page.locator("article.assistant .text").evaluate("element => element.textContent")
        assert shown == choice["message"]["content"]
        first = choice["logprobs"]["content"][0]
        tokens.first.hover()
        expect(page.get_by_role("tooltip")).to_contain_text(f"log-probability {first['logprob']:.3f}")
        assert page.get_by_role("tooltip").locator("tr").count() >= 5
        # The colour of a token is its probability's.
        assert float(tokens.first.evaluate("element => getComputedStyle(element).getPropertyValue('--p')")) > 0
        expect(top).not_to_have_text("top 1")
        page.get_by_label("Max tokens").fill("3500")
        aborted = server.metric("requests_aborted")
        # The random model might end by itself; this answer goes on until it is stopped.
        page.route(
            "**/v1/chat/completions",
            lambda route: route.continue_(post_data={**route.request.post_data_json, "ignore_eos": True}),
        )
        ask(page, "Go on")
        expect(page.locator("article.assistant").last.locator(".token").nth(20)).to_be_attached()
        page.keyboard.press("Escape")
        expect(page.locator("article.assistant .foot").last).to_contain_text("stopped")
        server.wait_idle()
        assert server.metric("requests_aborted") == aborted + 1
        page.get_by_label("Temperature").fill("-1")
        ask(page, "Refused by the page")
        assert len(sent) == 2
        assert not faults


ANSWER = [delta(role="assistant", content=""), delta(content="Hello"), delta(content=" you"), delta(finish="stop")]
USAGE = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15})


def test_a_conversation(page, stub):
    stub.script = [*ANSWER, USAGE, DONE]
    expect(page.get_by_label("Model", exact=True)).to_have_value("org/Tiny-1B")
    expect(page.locator("#state")).to_have_text("ready")
    ask(page, "  Hi\nthere ")
    answers = page.locator("article.assistant")
    expect(answers.locator(".text")).to_have_text("Hello you")
    expect(answers.locator(".foot")).to_contain_text("12 tokens")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Model", exact=True).select_option("other")
    for label, value in {"Temperature": "0.5", "Top-k": "40", "Min-p": "0.1", "Max tokens": "99", "Seed": "7"}.items():
        page.get_by_label(label).fill(value)
    page.get_by_label("Presence penalty").fill("-1")
    page.get_by_label("Stop at").fill("END\n\n##")
    ask(page, "More")
    expect(answers).to_have_count(2)
    expect(answers.last.locator(".text")).to_have_text("Hello you")
    page.get_by_role("button", name="Regenerate").click()
    expect(answers.last.locator(".foot")).to_contain_text("tokens")
    first, second, third = stub.asked
    assert first == {
        "model": "org/Tiny-1B",
        "messages": [{"role": "user", "content": "Hi\nthere"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    settings = {"temperature": 0.5, "top_k": 40, "min_p": 0.1, "max_tokens": 99, "seed": 7, "presence_penalty": -1}
    assert second == {
        **first,
        **settings,
        "model": "other",
        "stop": ["END", "##"],
        "messages": [
            {"role": "system", "content": "Be brief."},
            *first["messages"],
            {"role": "assistant", "content": "Hello you"},
            {"role": "user", "content": "More"},
        ],
    }
    assert third == second
    page.get_by_role("button", name="Clear conversation").click()
    expect(answers).to_have_count(0)
    expect(page.get_by_role("heading", name="Ask other")).to_be_visible()


def test_chunks_may_end_anywhere(page, stub):
    text = "naïve 🙂 漢字 \r\n end"
    stream = b": a comment\r\n\r\n" + b"".join([*[delta(content=c) for c in text], delta(finish="stop"), DONE])
    stream = stream.replace(b"\n\n", b"\r\n\r\n")
    # Single bytes, where characters and line ends are cut too; then larger pieces.
    cut = [stream[at : at + 1] for at in range(400)] + [stream[at : at + 7] for at in range(400, len(stream), 7)]
    stub.script = [part for piece in cut for part in (piece, 0.0005)]
    ask(page, "?")
    expect(page.locator("article.assistant .foot")).to_contain_text("Copy")
    # What was copied is compared, since HTML's text has no carriage returns.
    said = page.locator("article.assistant .text").evaluate("element => element.textContent")
    assert said == text


def test_stopping(page, stub):
    stub.script = [delta(content="word "), 0.1] * 100
    for how in (lambda: page.keyboard.press("Escape"), lambda: page.get_by_role("button", name="Stop").click()):
        stub.closed.clear()
        ask(page, "Go on")
        expect(page.locator("article.assistant").last).to_contain_text("word word")
        expect(page.get_by_role("button", name="Send")).to_be_hidden()
        how()
        expect(page.locator("article.assistant .foot").last).to_contain_text("stopped")
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        assert stub.closed.wait(10)


def test_html_is_shown_as_text(page, stub):
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": evil, "arguments": evil}}
    stub.script = [delta(content=evil, reasoning_content=evil), delta(tool_calls=[call]), delta(finish="stop"), DONE]
    ask(page, evil)
    article = page.locator("article.assistant")
    expect(article.locator(".text").last).to_have_text(evil)
    expect(article.locator(".call")).to_contain_text(evil)
    expect(page.locator("article.user .text")).to_have_text(evil)
    stub.script, stub.refuse = [], (400, {"error": {"message": evil}})
    ask(page, "again")
    expect(page.locator(".fault")).to_contain_text(evil)
    assert page.title() == "Phalanx" and page.locator("img").count() == 0


def test_token_probabilities(page, stub):
    smile = "🙂".encode()
    stub.script = [
        delta(content="Paris", logprobs=[token("Paris", 0.75, Lyon=0.2)]),
        # Two tokens of one character, then a stop string that is no part of the answer.
        delta(content=" 🙂", logprobs=[token(b" " + smile[:2], 0.5), token(smile[2:], 1.0)]),
        delta(finish="stop", logprobs=[token("##", 0.9)]),
        DONE,
    ]
    page.get_by_label("Show them in the next answers").check()
    ask(page, "Capital?")
    tokens, tip = page.locator(".token"), page.get_by_role("tooltip")
    expect(tokens).to_have_count(3)
    expect(page.locator("article.assistant .text")).to_have_text("Paris 🙂")
    assert stub.asked[0]["logprobs"] is True and stub.asked[0]["top_logprobs"] == 5
    tokens.first.hover()
    expect(tip).to_contain_text("75.0 % likely, log-probability -0.288")
    expect(tip.locator("tr")).to_have_text([re.compile("Paris.*75.0 %"), re.compile("Lyon.*20.0 %")])
    page.mouse.move(5, 5)
    expect(tip).to_be_hidden()
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(tip).to_contain_text("50.0 %")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_reasoning_and_tool_calls(page, stub):
    calls = [
        {"index": 0, "id": "call-1", "type": "function", "function": {"name": "weather", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"city": '}},
        {"index": 0, "function": {"arguments": '"Rome"}'}},
    ]
    stub.script = [delta(reasoning_content="Let me "), delta(reasoning_content="see.")]
    stub.script += [*(delta(tool_calls=[call]) for call in calls), delta(finish="tool_calls"), DONE]
    tools = page.get_by_label("What the model may call")
    tools.fill("{")
    ask(page, "Weather?")
    expect(tools).to_be_focused()
    assert not stub.asked
    tools.fill('[{"type": "function", "function": {"name": "weather"}}]')
    page.get_by_role("button", name="Send").click()
    article = page.locator("article.assistant")
    expect(article.locator(".call")).to_have_text('Calls weather{"city": "Rome"}')
    expect(article.locator(".thought .text")).to_be_hidden()
    article.get_by_text("Thought for 3 words").click()
    expect(article.locator(".thought .text")).to_have_text("Let me see.")
    ask(page, "And?")
    expect(article).to_have_count(2)
    expect(article.nth(1).locator(".call")).to_have_text('Calls weather{"city": "Rome"}')
    assert stub.asked[0]["tools"] == [{"type": "function", "function": {"name": "weather"}}]
    assert stub.asked[1]["messages"][1]["tool_calls"] == [
        {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    ]


@pytest.mark.parametrize(
    ("refuse", "script", "shown"),
    [
        ((400, {"error": {"message": "top_k is -3"}}), [], "refuses this request top_k is -3"),
        ((429, {"error": {"message": "64 requests wait."}}), [], "server is full 64 requests wait. Try again in 7 s."),
        ((503, {"error": {"message": "The engine died."}}), [], "engine is not available The engine died."),
        ((500, {}), [], "failed with status 500"),
        (None, [delta(content="so"), event(error={"message": "engine lost"})], "so The answer broke off engine lost"),
        (None, [delta(content="so")], "so The answer broke off The connection ended"),
        (None, [b"data: {oops\n\n"], "cannot be read"),
    ],
)
def test_errors_are_readable_and_can_be_tried_again(page, stub, refuse, script, shown):
    stub.refuse, stub.script = refuse, script
    ask(page, "Hi")
    article = page.locator("article.assistant")
    expect(article.locator(".fault")).to_be_visible()
    assert shown in " ".join(article.inner_text().split())
    stub.refuse, stub.script = None, [*ANSWER, DONE]
    page.get_by_role("button", name="Try again").click()
    expect(article.locator(".text")).to_have_text("Hello you")
    assert [message["content"] for message in stub.asked[1]["messages"]] == ["Hi"]


def test_charts_move_and_pause_while_hidden(page, stub):
    stub.figures = {"generation_tokens_total": 100, 'kv_cache_usage_perc{engine="0"}': 0.25}
    throughput = page.locator("#chart-throughput")
    expect(page.locator("#chart-kv output")).to_have_text("25.0 %")
    expect(throughput.locator("output")).to_have_text("0.0 tokens/s")
    before = throughput.locator("path.first").get_attribute("d")
    histogram = {"time_to_first_token_seconds_sum": 0.5, "time_to_first_token_seconds_count": 2}
    stub.figures = {"generation_tokens_total": 1100, "num_requests_running": 3, "num_requests_waiting": 2, **histogram}
    expect(page.locator("#chart-queue output")).to_have_text("3 running, 2 waiting")
    expect(page.locator("#chart-ttft output")).to_have_text("250 ms")
    # 1,000 tokens between two polls a second apart; the newest poll may have seen none.
    top = throughput.locator("div span").first.inner_text()
    assert (
        top in ("top 500", "top 1,000", "top 2,000") and throughput.locator("path.first").get_attribute("d") != before
    )
    polled: list[str] = []
    page.on("request", lambda asked: polled.append(asked.url))
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.wait_for_timeout(300)
    polled.clear()
    page.wait_for_timeout(1500)
    assert not polled
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_timeout(500)
    assert polled


def test_an_api_key(browser, stub):
    stub.key, stub.script = "secret", [*ANSWER, DONE]
    with browser.new_context(viewport={"width": 390, "height": 780}) as context:
        page = context.new_page()
        page.goto(stub.url)
        expect(page.locator("#notice")).to_contain_text("wants an API key")
        page.get_by_role("button", name="Enter the key").click()
        key = page.get_by_label("Kept in this tab only")
        expect(key).to_be_focused()
        key.fill("secret")
        key.blur()
        page.keyboard.press("Escape")
        expect(page.locator("#notice")).to_be_empty()
        ask(page, "Hi")
        expect(page.locator("article.assistant .text")).to_have_text("Hello you")
        stored = "[Object.values(sessionStorage).join(), Object.values(localStorage).join()]"
        in_tab, kept = page.evaluate(stored)
        assert "secret" in in_tab and "secret" not in kept
        # Nothing is wider than a phone.
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_an_engine_that_is_lost_and_found(page, stub):
    expect(page.locator("#state")).to_have_text("ready")
    stub.healthy, stub.refuse = False, (503, {"error": {"message": "gone"}})
    ask(page, "Hi")
    expect(page.locator("#state")).to_have_text("engine lost")
    stub.healthy, stub.ready = True, False
    expect(page.locator("#state")).to_have_text("not ready")
    stub.ready = True
    expect(page.locator("#state")).to_have_text("ready")


def luminance(colour: tuple[int, ...]) -> float:
    """WCAG's relative luminance."""
    channels = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast(browser, stub, theme):
    """Text stands out from what lies behind it as WCAG's level AA asks: 4.5 to 1."""
    with browser.new_context(color_scheme=theme) as context:
        page = context.new_page()
        page.goto(stub.url)
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        read = """name => {
            const hex = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
            return [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
        }"""
        pairs = [("text", back) for back in ("back", "surface", "raised", "user", "bad-soft", "accent-soft")]
        pairs += [("soft", back) for back in ("back", "surface", "raised")]
        pairs += [("on-accent", "accent"), ("bad", "bad-soft"), ("bad", "raised")]
        for front, back in pairs:
            light, dark = sorted((luminance(page.evaluate(read, name)) for name in (front, back)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (front, back)
        page.get_by_role("button", name="Dark colours").click()
        assert page.evaluate("document.documentElement.dataset.theme") != theme
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") != theme


def test_nothing_comes_from_elsewhere():
    text = PAGE.read_text()
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", text) and "innerHTML" not in text
    assert os.path.getsize(PAGE) < 100_000
