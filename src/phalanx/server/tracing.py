"""Traces: a span for each request, by OpenTelemetry."""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode

from phalanx.server.edge import RequestRecord
from phalanx.server.request_log import QUIET


class Tracing:
    """Sends a span for each request that has been answered.

    Args:
        endpoint: of a collector, HTTP: "http://localhost:4318/v1/traces".
        model: the attribute ``gen_ai.request.model``.
        exporter: instead of one for the endpoint.
    """

    def __init__(self, endpoint: str, model: str, exporter: SpanExporter | None = None) -> None:
        self._model = model
        self._provider = TracerProvider(resource=Resource.create({"service.name": "phalanx"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("phalanx.server")

    def __call__(self, record: RequestRecord) -> None:
        """The span of one request."""
        if record.path in QUIET:
            return
        began = int(record.began_at * 1e9)
        span = self._tracer.start_span(f"{record.method} {record.path}", kind=SpanKind.SERVER, start_time=began)
        span.set_attributes(
            {
                "http.request.method": record.method,
                "url.path": record.path,
                "http.response.status_code": record.status,
                "gen_ai.request.id": record.request_id,
                "gen_ai.request.model": self._model,
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.output_tokens": record.completion_tokens,
            }
        )
        if record.finish_reasons:
            span.set_attribute("gen_ai.response.finish_reasons", record.finish_reasons)
        for name, seconds in (
            ("gen_ai.latency.time_in_queue", record.queue_seconds),
            ("gen_ai.latency.time_to_first_token", record.first_token_seconds),
        ):
            if seconds is not None:
                span.set_attribute(name, seconds)
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.error or ""))
        span.end(began + int(record.seconds * 1e9))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()
