"""``phalanx serve``: a model behind OpenAI's HTTP routes."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.failures import Failure
from phalanx.cli.option_groups import grouped
from phalanx.cli.options import EngineOptions, OutputOptions, parse_size
from phalanx.cli.running import fetched, notes, sayer, set_logging

if TYPE_CHECKING:
    from phalanx.server.service import Service
    from phalanx.server.settings import ServerSettings


def _server(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel="Server")


@dataclass(frozen=True)
class ServerOptions:
    """The HTTP side."""

    host: Annotated[str | None, _server("--host", help="Address to listen on; 0.0.0.0 for all. \\[127.0.0.1]")] = None
    port: Annotated[int | None, _server("--port", help="Port to listen on; 0 picks one. \\[8000]")] = None
    uds: Annotated[Path | None, _server("--uds", metavar="PATH", help="Listen on a Unix socket instead of a port.")] = (
        None
    )
    served_model_name: Annotated[
        list[str], _server("--served-model-name", help="What clients call the model. Repeatable. \\[the model's own]")
    ] = field(default_factory=list)
    api_key: Annotated[
        list[str], _server("--api-key", metavar="KEY", help="Ask for this key. Repeatable; seen in process lists.")
    ] = field(default_factory=list)
    api_key_file: Annotated[
        Path | None, _server("--api-key-file", metavar="FILE", help="Ask for one of these keys, a line each.")
    ] = None
    cors_origin: Annotated[
        list[str], _server("--cors-origin", metavar="URL", help="Pages from here may call; *: all. Repeatable.")
    ] = field(default_factory=list)
    max_body_size: Annotated[str, _server("--max-body-size", metavar="SIZE", help="Longest request body.")] = "16MiB"
    max_prompts: Annotated[int, _server("--max-prompts", help="Prompts of one request.")] = 64
    max_queue: Annotated[int, _server("--max-queue", help="Answers that may wait; further requests get 429.")] = 1024
    request_timeout: Annotated[
        float, _server("--request-timeout", metavar="SECONDS", help="A request may take so long; 0: no limit.")
    ] = 600.0
    drain_timeout: Annotated[
        float, _server("--drain-timeout", metavar="SECONDS", help="What SIGTERM leaves to running requests.")
    ] = 30.0
    data_parallel: Annotated[
        int, _server("--data-parallel", metavar="N", help="Engines behind the port, each with the whole model.")
    ] = 1
    restart: Annotated[bool, _server("--restart", help="Start an engine again when it has died.")] = False
    chat_template: Annotated[
        Path | None, _server("--chat-template", metavar="FILE", help="Instead of the tokenizer's own.")
    ] = None
    trust_request_chat_template: Annotated[
        bool, _server("--trust-request-chat-template", help="Take chat templates from requests.")
    ] = False
    tool_format: Annotated[
        str, _server("--tool-format", help="How the model calls functions: auto, none, hermes, llama3, mistral.")
    ] = "auto"
    reasoning_format: Annotated[
        str, _server("--reasoning-format", help="How the model writes its thinking: auto, none, think, ...")
    ] = "auto"
    log_format: Annotated[str, _server("--log-format", help="text, or json: a JSON object a request.")] = "text"
    log_prompts: Annotated[bool, _server("--log-prompts", help="Prompts and answers go into the log.")] = False
    otlp_endpoint: Annotated[
        str | None, _server("--otlp-endpoint", metavar="URL", help="Send OpenTelemetry traces there.")
    ] = None

    def settings(self, model: str, engine: dict[str, Any]) -> ServerSettings:
        """What was given.

        Raises:
            ValueError: a value that cannot be read.
        """
        from phalanx.server.settings import MAX_PROMPTS, ServerSettings

        if self.log_format not in ("text", "json"):
            raise typer.BadParameter(f"--log-format is text or json, given {self.log_format!r}")
        for option, value in (
            ("--max-prompts", self.max_prompts),
            ("--max-queue", self.max_queue),
            ("--request-timeout", self.request_timeout),
            ("--drain-timeout", self.drain_timeout),
        ):
            if not 0 <= value < 10**9:
                raise typer.BadParameter(f"{option} must not be negative, given {value}")
        if self.max_prompts > MAX_PROMPTS:
            raise typer.BadParameter(f"--max-prompts is at most {MAX_PROMPTS}, given {self.max_prompts}")
        if self.uds is not None and (self.host is not None or self.port is not None):
            raise typer.BadParameter("--uds listens on a Unix socket instead of a port: leave --host and --port out")
        if not 0 <= (self.port or 0) <= 65535:
            raise typer.BadParameter(f"--port is 0 to 65535, given {self.port}")
        for origin in self.cors_origin:
            # As browsers send it: a slash behind it, and no page would ever be let in.
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise typer.BadParameter(f"--cors-origin is like https://page.example, or *, given {origin!r}")
        if self.otlp_endpoint is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.otlp_endpoint):
            raise typer.BadParameter(
                f"--otlp-endpoint is like http://127.0.0.1:4318/v1/traces, given {self.otlp_endpoint!r}"
            )
        if not all(name.strip() for name in self.served_model_name):
            raise typer.BadParameter("--served-model-name is empty")
        if not 1 <= self.data_parallel <= 64:
            raise typer.BadParameter(f"--data-parallel is 1 to 64, given {self.data_parallel}")
        max_body_bytes = parse_size(self.max_body_size)
        if max_body_bytes < 1:
            raise typer.BadParameter(f"--max-body-size must be at least 1 byte, given {self.max_body_size!r}")
        return ServerSettings(
            model=model,
            engine=engine,
            names=tuple(self.served_model_name),
            api_keys=(*self.api_key, *self._keys_of_file()),
            cors_origins=tuple(self.cors_origin),
            max_body_bytes=max_body_bytes,
            max_prompts=self.max_prompts,
            max_queue=self.max_queue,
            request_timeout=self.request_timeout or None,
            drain_timeout=self.drain_timeout,
            data_parallel=self.data_parallel,
            restart=self.restart,
            chat_template=None if self.chat_template is None else _text("--chat-template", self.chat_template),
            trust_request_templates=self.trust_request_chat_template,
            tool_format=None if self.tool_format == "none" else self.tool_format,
            reasoning_format=None if self.reasoning_format == "none" else self.reasoning_format,
            log_format=self.log_format,  # type: ignore[arg-type]
            log_prompts=self.log_prompts,
            otlp_endpoint=self.otlp_endpoint,
        )

    def _keys_of_file(self) -> list[str]:
        if self.api_key_file is None:
            return []
        keys = [line.strip() for line in _text("--api-key-file", self.api_key_file).splitlines()]
        if not any(keys):
            raise typer.BadParameter(f"--api-key-file {self.api_key_file} holds no key")
        return [key for key in keys if key]


def _text(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise typer.BadParameter(f"{option} {path} cannot be read: {reason}") from None


@grouped
def serve(
    model: Annotated[str, typer.Argument(help="What answers.")],
    *,
    server: ServerOptions,
    engine: EngineOptions,
    output: OutputOptions,
) -> None:
    """Serve a model over HTTP: OpenAI's routes, Prometheus metrics, and a page to try it at /.

    Ends in order on SIGTERM or Ctrl-C: new requests get 503, running ones are finished. With --json, a line
    {"ready": URL} on standard output says that the model is loaded.
    """
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None]
    if missing:
        raise Failure(f"phalanx serve needs {', '.join(missing)}: pip install 'phalanx[server]'")
    if server.otlp_endpoint is not None and importlib.util.find_spec("opentelemetry") is None:
        raise Failure("--otlp-endpoint needs OpenTelemetry: pip install 'phalanx[otel]'")
    set_logging(output)
    from phalanx.config import engine_config
    from phalanx.server.engine_client import EngineStartError
    from phalanx.server.run import listen, listen_unix, run

    settings = server.settings(model, engine.settings())
    engine_config(settings.engine)
    if server.uds is not None:
        listener, url = listen_unix(server.uds), f"unix:{server.uds}"
    else:
        host = "127.0.0.1" if server.host is None else server.host
        listener = listen(host, 8000 if server.port is None else server.port)
        url = _url(host, listener.getsockname()[1])
    console = notes()
    with console.status(f"loading {model}") as status:
        fetched(model, sayer(console, status))

        def on_ready(service: Service) -> None:
            status.stop()
            length = service.ready.max_model_len
            notes().print(
                f"{service.name} ({length} tokens of context) is served at {url}", style="green", markup=False
            )
            if output.json:
                typer.echo(f'{{"ready": "{url}"}}')

        try:
            run(settings, listener, on_ready)
        except EngineStartError as error:
            raise (ValueError if error.bad_input else Failure)(str(error)) from None


def _url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
