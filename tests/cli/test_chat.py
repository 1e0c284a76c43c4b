import json
import os
import select
import signal
import subprocess
import sys
import time

import pytest

from phalanx import LLM
from phalanx.cli.chat import Conversation, Keyboard
from tests.cli.conftest import ENGINE, records


@pytest.fixture(scope="module")
def llm(tiny_folder):
    with LLM(tiny_folder, num_blocks=64) as llm:
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


def test_a_conversation_through_a_pipe(run, tiny_folder, llm):
    typed = "hello\nand you\n/clear\n\n/what\nhello\n/quit\nnever read\n"
    done = run("chat", tiny_folder, "--max-tokens", 6, *ENGINE, input=typed)
    assert done.exit_code == 0 and "unknown command /what" in done.stderr
    answers = [*expected(llm, "hello", "and you"), *expected(llm, "hello")]
    assert done.stdout == "".join(f"{answer}\n" for answer in answers)


def test_json_and_a_system_message(run, tiny_folder, llm):
    done = run("chat", tiny_folder, "--json", "--system", "be kind", "--max-tokens", 6, *ENGINE, input="hello\nso\n")
    found = records(done.stdout)
    assert [turn["content"] for turn in found] == expected(llm, "hello", "so", system="be kind")
    assert [turn["finish_reason"] for turn in found] == ["length", "length"]
    assert found[0]["prompt_tokens"] < found[1]["prompt_tokens"] and found[0]["completion_tokens"] == 6


def test_a_message_that_does_not_fit_is_told_and_forgotten(run, tiny_folder, llm):
    typed = f"hello\n{'x' * 400}\nand you\n"
    done = run("chat", tiny_folder, "--max-tokens", 6, *ENGINE, input=typed)
    assert done.exit_code == 0 and "/clear begins anew" in done.stderr
    assert done.stdout == "".join(f"{answer}\n" for answer in expected(llm, "hello", "and you"))
    lines = records(run("chat", tiny_folder, "--json", "--max-tokens", 6, *ENGINE, input=typed).stdout)
    assert "the limit is" in lines[1]["error"]["message"] and "content" in lines[2]


@pytest.fixture
def interruptible():
    """Ctrl-C as at a prompt: a test run in the background may have inherited that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stops_the_answer_and_keeps_what_there_is(llm):
    conversation = Conversation(llm, {"max_tokens": 50, "ignore_eos": True})
    pieces = []

    def show(piece):
        pieces.append(piece)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    with Keyboard(terminal=False) as keyboard:
        answer = conversation.say("hello", show, keyboard.interrupted)
    assert answer["finish_reason"] == "abort" and answer["completion_tokens"] == 3
    assert conversation.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert conversation.say("go on", lambda piece: None, lambda: False)["finish_reason"] == "length"


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_by_where_it_comes(monkeypatch):
    def interrupt_then(*values):
        lines = iter(values)

        def read(prompt=""):
            line = next(lines)
            if line is None:
                signal.raise_signal(signal.SIGINT)
            return line

        return read

    monkeypatch.setattr("builtins.input", interrupt_then(None, "hello", "so"))
    with Keyboard(terminal=True) as keyboard:
        # A line that is being typed is broken off, the next one counts.
        assert keyboard.line() == "hello" and not keyboard.interrupted()
        signal.raise_signal(signal.SIGINT)
        assert keyboard.interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert keyboard.line() == "so" and not keyboard.interrupted()
    monkeypatch.setattr("sys.stdin.readline", interrupt_then(None, ""), raising=False)
    with Keyboard(terminal=False) as keyboard, pytest.raises(KeyboardInterrupt):
        keyboard.line()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_conversation_needs_a_template_and_single_answers(run, tiny_folder, tmp_path):
    for file in tiny_folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    done = run("chat", tmp_path, "--json", *ENGINE)
    assert done.exit_code == 2 and "no chat template" in json.loads(done.stdout)["error"]["message"]
    done = run("chat", tiny_folder, "--n", 2, *ENGINE)
    assert done.exit_code == 2 and "a conversation has no n" in done.stderr


class Terminal:
    """A ``phalanx chat`` that believes it talks to a person."""

    def __init__(self, *arguments):
        self.end, theirs = os.openpty()
        command = [sys.executable, "-m", "phalanx.cli", "chat", *map(str, arguments)]
        env = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=env)
        os.close(theirs)

    def type(self, text):
        os.write(self.end, text.encode())

    def read_until(self, mark, meanwhile=lambda: None):
        """Reads up to this text; ``meanwhile`` is done once a second until it comes."""
        seen, since = b"", time.monotonic()
        while not seen.endswith(mark.encode()):
            assert time.monotonic() - since < 60, f"waited for {mark!r} behind {seen!r}"
            ready, _, _ = select.select([self.end], [], [], 1)
            if ready:
                seen += os.read(self.end, 1)
            else:
                meanwhile()

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)


@pytest.mark.slow
def test_at_a_terminal(tiny_folder):
    chat = Terminal(tiny_folder, "--ignore-eos", "--max-tokens", 200, *ENGINE)
    chat.read_until("> ")
    # At the prompt: a new one. Python misses a signal that comes just before it waits for a key, hence more than one.
    chat.read_until("> ", chat.interrupt)
    chat.type("hello\n")
    chat.read_until("hello\r\n")
    chat.interrupt()  # before the answer, or in it
    chat.read_until("> ")
    chat.type("/clear\n")
    chat.read_until("> ")
    chat.type("\x04")
    assert chat.process.wait(30) == 0
    os.close(chat.end)
