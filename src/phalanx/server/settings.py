"""ServerSettings: everything about the HTTP side that a user may choose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

MAX_PROMPTS = 65536
"""What ``max_prompts`` may be at most."""


@dataclass(frozen=True)
class ServerSettings:
    """What is served and within which limits. Times are in seconds, sizes in bytes.

    Raises:
        ValueError: an API key is empty.

    Attributes:
        model: a folder, a file, a hub id, "smollm2".
        engine: settings of EngineConfig.
        names: what clients call the model; the first one stands in answers.
        api_keys: one of these must come as a bearer token; empty: nobody is asked.
        cors_origins: pages of these origins may call; "*": all.
        max_body_bytes: longest request body.
        max_prompts: prompts of one request, at most ``MAX_PROMPTS``.
        max_queue: answers that may wait for a place in the engine; further requests get 429. None: any number.
        request_timeout: a request that takes longer ends with 408. None: no limit.
        drain_timeout: what SIGTERM leaves to running requests.
        data_parallel: engines behind the port, each with a copy of the model.
        restart: start an engine again when it has died.
        chat_template: stands in for the tokenizer's own.
        trust_request_templates: a request may bring a chat template.
        tool_format, reasoning_format: how the model writes tool calls and reasoning; "auto": as its chat template
            suggests, None: it does not.
        log_format: one line a request for people, or one JSON object.
        log_prompts: prompts and answers go into the log.
        otlp_endpoint: where traces go. None: nowhere.
    """

    model: str
    engine: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 1024 * 1024
    max_prompts: int = 64
    max_queue: int | None = 1024
    request_timeout: float | None = 600.0
    drain_timeout: float = 30.0
    data_parallel: int = 1
    restart: bool = False
    chat_template: str | None = None
    trust_request_templates: bool = False
    tool_format: str | None = "auto"
    reasoning_format: str | None = "auto"
    log_format: Literal["text", "json"] = "text"
    log_prompts: bool = False
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not all(key.strip() for key in self.api_keys):
            # An empty one would let everybody in who sends none.
            raise ValueError("an API key is empty: give one that is not, or leave it out")
