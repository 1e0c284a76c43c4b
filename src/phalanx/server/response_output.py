"""ResponseOutput: one answer as the items of a response, and as the events that build them."""

from __future__ import annotations

from typing import Any

from phalanx.server.errors import encode
from phalanx.server.sse import event


class ResponseOutput:
    """Takes the deltas of a ChatOutput. One item is open at a time; a delta of another kind closes it.

    Args:
        request_id: part of the items' ids.

    Attributes:
        items: all so far, as the response holds them.
    """

    def __init__(self, request_id: str) -> None:
        self.items: list[dict[str, Any]] = []
        self._request_id = request_id
        self._open = False
        self._number = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        """An event, numbered."""
        number, self._number = self._number, self._number + 1
        return event(encode({"type": kind, "sequence_number": number, **fields}), kind)

    def push(self, delta: dict[str, Any]) -> bytes:
        """The events that a delta gives."""
        if "reasoning_content" in delta:
            return self._text("reasoning", delta["reasoning_content"])
        if "content" in delta:
            return self._text("message", delta["content"])
        (call,) = delta["tool_calls"]
        function, events = call["function"], b""
        if "id" in call:
            events = self._close() + self._begin_call(call["id"], function["name"])
        if function["arguments"]:
            item = self.items[-1]
            item["arguments"] += function["arguments"]
            events += self._of_item("response.function_call_arguments.delta", delta=function["arguments"])
        return events

    def end(self, cut: bool) -> bytes:
        """The events of the end; ``cut``: there was no room for more. An answer of nothing is an empty message."""
        status = "incomplete" if cut else "completed"
        return self._close(status) if self.items else self._text("message", "") + self._close(status)

    def _close(self, status: str = "completed") -> bytes:
        """Ends the item that is open, if any."""
        if not self._open:
            return b""
        self._open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            events = self._of_item(
                "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
            )
        else:
            (part,) = item["content"]
            kind = "response.reasoning_text.done" if item["type"] == "reasoning" else "response.output_text.done"
            events = self._of_item(kind, content_index=0, text=part["text"], **self._logprobs())
            events += self._of_item("response.content_part.done", content_index=0, part=part)
        place = len(self.items) - 1
        return events + self.event("response.output_item.done", output_index=place, item=item)

    def _text(self, kind: str, text: str) -> bytes:
        events = b""
        if not (self._open and self.items[-1]["type"] == kind):
            events = self._close() + self._begin_text(kind)
        if text:
            self.items[-1]["content"][0]["text"] += text
            name = "response.reasoning_text.delta" if kind == "reasoning" else "response.output_text.delta"
            events += self._of_item(name, content_index=0, delta=text, **self._logprobs())
        return events

    def _begin_text(self, kind: str) -> bytes:
        item: dict[str, Any] = {"id": self._id("rs" if kind == "reasoning" else "msg"), "type": kind}
        item["status"] = "in_progress"
        if kind == "reasoning":
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            item["summary"] = []
        else:
            part = {"type": "output_text", "text": "", "annotations": []}
            item["role"] = "assistant"
        events = self._begin({**item, "content": []})
        self.items[-1]["content"] = [part]
        return events + self._of_item("response.content_part.added", content_index=0, part=part)

    def _begin_call(self, call_id: str, name: str) -> bytes:
        item = {"id": self._id("fc"), "type": "function_call", "status": "in_progress", "call_id": call_id}
        return self._begin({**item, "name": name, "arguments": ""})

    def _begin(self, item: dict[str, Any]) -> bytes:
        self.items.append(item)
        self._open = True
        return self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self.event(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **fields)

    def _logprobs(self) -> dict[str, Any]:
        """Clients expect the field at texts."""
        return {"logprobs": []} if self.items[-1]["type"] == "message" else {}

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._request_id}-{len(self.items)}"
