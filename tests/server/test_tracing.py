"""A span for each request."""

from __future__ import annotations

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from phalanx.server.edge import RequestRecord
from phalanx.server.tracing import Tracing


def test_a_request_is_a_span() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("http://nowhere.invalid", "tiny", exporter)
    record = RequestRecord("mine", "POST", "/v1/completions", began_at=1000.0, status=200, seconds=0.5)
    record.prompt_tokens, record.completion_tokens, record.finish_reasons = 5, 7, ["stop"]
    record.first_token_seconds = 0.1
    tracing(record)
    tracing(RequestRecord("other", "GET", "/health", status=200))
    tracing(RequestRecord("third", "POST", "/v1/completions", status=503, error="dead"))
    tracing.close()
    first, third = exporter.get_finished_spans()
    assert first.name == "POST /v1/completions" and first.end_time - first.start_time == 500_000_000
    assert first.attributes["gen_ai.usage.output_tokens"] == 7
    assert first.attributes["gen_ai.latency.time_to_first_token"] == 0.1
    assert first.status.is_ok and not third.status.is_ok
