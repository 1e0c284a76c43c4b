"""The model's thinking, told from its answer."""

from __future__ import annotations

from phalanx.server.parsing.tool_parsers import held_back

MARKS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
"""How thinking begins and ends. "think": the model cards of deepseek-ai/DeepSeek-R1 and Qwen/Qwen3-8B, whose chat
templates may have opened it in the prompt; "mistral": that of mistralai/Magistral-Small-2509."""


class ReasoningSplit:
    """Cuts a stream of text into thinking, which only the beginning of an answer can be, and the rest.

    White space around the marks belongs to neither.

    Args:
        format: of MARKS.
        opened: the prompt has opened the thinking.
    """

    def __init__(self, format: str, opened: bool) -> None:
        self._open, self._close = MARKS[format]
        self._text = ""
        self._state = "before"
        self._opened = opened
        self._begun = False

    def push(self, text: str, closed: bool = False) -> tuple[str, str]:
        """Takes text; returns what is certain of the thinking, and what comes behind it."""
        if self._state == "behind":
            return "", text
        self._text += text
        if self._state == "before":
            body = self._text.lstrip()
            if len(body) < len(self._open) and self._open.startswith(body) and not closed:
                return "", ""
            # A model may open what its prompt has opened already.
            if not body.startswith(self._open) and not self._opened:
                return "", self._rest("behind")
            self._text = body.removeprefix(self._open)
            self._state = "inside"
        thought = self._inside(closed) if self._state == "inside" else ""
        if self._state == "closing":
            self._text = self._text.lstrip()
            if self._text:
                return thought, self._rest("behind")
        return thought, ""

    def _inside(self, closed: bool) -> str:
        place = self._text.find(self._close)
        ended = place >= 0
        if not ended:
            place = len(self._text) - (0 if closed else held_back(self._text, self._close))
        thought = self._text[:place] if self._begun else self._text[:place].lstrip()
        kept = thought if closed and not ended else thought.rstrip()
        self._begun |= bool(kept)
        if ended:
            self._text = self._text[place + len(self._close) :]
            self._state = "closing"
        else:
            self._text = thought[len(kept) :] + self._text[place:]
        return kept

    def _rest(self, state: str) -> str:
        text, self._text, self._state = self._text, "", state
        return text
