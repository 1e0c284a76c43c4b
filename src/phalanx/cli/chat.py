"""``phalanx chat``: a conversation in the terminal, or through pipes."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.option_groups import grouped
from phalanx.cli.options import EngineOptions, OutputOptions, SamplingOptions, check_sampling
from phalanx.cli.running import check_name, has_template, load, notes

if TYPE_CHECKING:
    from phalanx.engine import LLM

HELP = "/clear begins anew, /quit (or Ctrl-D) ends, Ctrl-C stops an answer"


@grouped
def chat(
    model: Annotated[str, typer.Argument(help="Whom to talk to; it needs a chat template.")],
    system: Annotated[str | None, typer.Option("--system", help="What the model is told first.")] = None,
    *,
    sampling: SamplingOptions,
    engine: EngineOptions,
    output: OutputOptions,
) -> None:
    """Talk to a model. Each line is a message; the answers come as they are drawn, and earlier turns stay in sight.

    /clear forgets the conversation, /quit ends it, Ctrl-C stops the answer. Through a pipe, each line of standard input
    is a message; with --json each answer is a JSON object on a line of its own.
    """
    settings = sampling.settings()
    for name in ("n", "logprobs", "prompt_logprobs"):
        if name in settings:
            raise typer.BadParameter(f"a conversation has no {name}: use phalanx generate")
    check_name(model)
    check_sampling(settings)
    with load(model, engine, output) as llm:
        if not has_template(llm):
            raise typer.BadParameter(f"{llm.name} has no chat template: use phalanx generate")
        conversation = Conversation(llm, settings, system)
        terminal = sys.stdin.isatty() and not output.json
        if terminal:
            notes().print(f"{llm.name}, {llm.max_model_len} tokens of context. {HELP}.", style="dim", markup=False)
        with Keyboard(terminal) as keyboard:
            while (line := keyboard.line()) is not None:
                text = line.strip()
                if text == "/quit":
                    break
                if text == "/clear":
                    conversation.clear()
                elif text.startswith("/"):
                    notes().print(f"unknown command {text}: {HELP}", markup=False)
                elif text:
                    _turn(conversation, text, keyboard, output.json)


def _turn(conversation: Conversation, text: str, keyboard: Keyboard, as_json: bool) -> None:
    """One message and its answer; a message that cannot be answered is told and forgotten."""

    def show(piece: str) -> None:
        if not as_json:
            typer.echo(piece, nl=False)
            sys.stdout.flush()

    try:
        answer = conversation.say(text, show, keyboard.interrupted)
    except ValueError as error:
        if as_json:
            typer.echo(json.dumps({"error": {"type": type(error).__name__, "message": str(error)}}))
        else:
            notes().print(f"{error} (/clear begins anew)", style="red", markup=False)
        return
    typer.echo(json.dumps(answer) if as_json else "")


class Conversation:
    """A model's side of a conversation.

    Args:
        settings: fields of SamplingParams.
        system: a message that stands before all others.
    """

    def __init__(self, llm: LLM, settings: dict[str, Any], system: str | None = None) -> None:
        self.llm = llm
        self.settings = settings
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._first)

    def clear(self) -> None:
        """Forgets everything but the system message."""
        self.messages = list(self._first)

    def say(self, text: str, show: Callable[[str], None], interrupted: Callable[[], bool]) -> dict[str, Any]:
        """Adds a message and its answer, which ``show`` gets in pieces; once ``interrupted()``, what there is of it.

        Returns:
            role, content, finish_reason ("abort" where it was interrupted), the numbers of prompt and answer tokens.

        Raises:
            ValueError: the conversation is too long by now, or the template refuses it; the message is forgotten.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.llm.prompt_of(messages)
        pieces: list[str] = []
        tokens, reason = 0, "abort"
        for chunk in self.llm.stream(prompt, self.settings):
            pieces.append(chunk.text)
            tokens += len(chunk.token_ids)
            show(chunk.text)
            if chunk.error is not None:
                raise ValueError(chunk.error)
            reason = chunk.finish_reason or "abort"
            if interrupted():
                break
        content = "".join(pieces)
        self.messages = [*messages, {"role": "assistant", "content": content}]
        return {
            "role": "assistant",
            "content": content,
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "completion_tokens": tokens,
        }


class Keyboard:
    """Lines of the user, and Ctrl-C, for as long as a conversation goes on.

    Ctrl-C breaks off a line that is being typed. While an answer comes it only sets a flag, so that a step of the
    engine is never broken off; a second one ends the program.

    Args:
        terminal: a person types, with a prompt; else lines are read from standard input, where Ctrl-C ends the program.
    """

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        self._reading = False
        self._interrupted = False
        if terminal:
            with suppress(ImportError):  # not on every system; input() works without
                import readline  # noqa: F401 - input() gets editing and history by its presence

    def __enter__(self) -> Keyboard:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: Any) -> None:
        signal.signal(signal.SIGINT, self._before)

    def line(self) -> str | None:
        """The next line; None at the end."""
        while True:
            self._interrupted = False
            try:
                return self._read()
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                print()

    def interrupted(self) -> bool:
        """Whether Ctrl-C came since the last line."""
        return self._interrupted

    def _read(self) -> str:
        self._reading = True
        try:
            if self._terminal:
                return input("> ")
            line = sys.stdin.readline()
        finally:
            self._reading = False
        if not line:
            raise EOFError
        return line

    def _handle(self, number: int, frame: Any) -> None:
        if self._reading or self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True
