import json
import signal

import pytest

from phalanx import LLM
from phalanx.cli.chat import Conversation
from tests.cli.conftest import ENGINE, records


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny, num_blocks=64) as llm:
        yield llm
        llm.core.check_idle()


def expected(llm, *turns, system=None):
    """The answers to these messages by LLM.chat, each in sight of the turns before."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answers.append(llm.chat(messages, max_tokens=6)[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_a_conversation_through_a_pipe(run, tiny, llm):
    typed = "hello\nand you\n/clear\n\n/what\nhello\n/quit\nnever read\n"
    done = run("chat", tiny, "--max-tokens", 6, *ENGINE, input=typed)
    assert done.exit_code == 0 and "unknown command /what" in done.stderr
    answers = [*expected(llm, "hello", "and you"), *expected(llm, "hello")]
    assert done.stdout == "".join(f"{answer}\n" for answer in answers)


def test_json_and_a_system_message(run, tiny, llm):
    done = run("chat", tiny, "--json", "--system", "be kind", "--max-tokens", 6, *ENGINE, input="hello\nso\n")
    found = records(done.stdout)
    assert [turn["content"] for turn in found] == expected(llm, "hello", "so", system="be kind")
    assert [turn["finish_reason"] for turn in found] == ["length", "length"]
    assert found[0]["prompt_tokens"] < found[1]["prompt_tokens"] and found[0]["completion_tokens"] == 6


def test_a_message_that_does_not_fit_is_told_and_forgotten(run, tiny, llm):
    typed = f"hello\n{'x' * 400}\nand you\n"
    done = run("chat", tiny, "--max-tokens", 6, *ENGINE, input=typed)
    assert done.exit_code == 0 and "/clear begins anew" in done.stderr
    assert done.stdout == "".join(f"{answer}\n" for answer in expected(llm, "hello", "and you"))
    lines = records(run("chat", tiny, "--json", "--max-tokens", 6, *ENGINE, input=typed).stdout)
    assert "the limit is" in lines[1]["error"]["message"] and "content" in lines[2]


def test_ctrl_c_stops_the_answer_and_keeps_what_there_is(llm):
    conversation = Conversation(llm, {"max_tokens": 50, "ignore_eos": True})
    pieces = []

    def show(piece):
        pieces.append(piece)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    answer = conversation.say("hello", show)
    assert answer["finish_reason"] == "abort" and answer["completion_tokens"] == 3
    assert conversation.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert conversation.say("go on", lambda piece: None)["finish_reason"] == "length"


def test_a_second_ctrl_c_is_as_ever(llm):
    def show(piece):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Conversation(llm, {}).say("hello", show)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_conversation_needs_a_template_and_single_answers(run, tiny, tmp_path):
    for file in tiny.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    done = run("chat", tmp_path, "--json", *ENGINE)
    assert done.exit_code == 2 and "no chat template" in json.loads(done.stdout)["error"]["message"]
    done = run("chat", tiny, "--n", 2, *ENGINE)
    assert done.exit_code == 2 and "a conversation has no n" in done.stderr
