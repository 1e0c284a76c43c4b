"""Metrics: the Prometheus series of a server, with the names and meanings that dashboards of vLLM know."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from phalanx.server.engine_client import EngineState
from phalanx.server.engines import Engines

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LONG = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)


class Histogram:
    """Counts of values in buckets; ``observe`` is cheap enough for every token."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name = f"phalanx:{name}"
        self.help = help
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, model: str) -> HistogramMetricFamily:
        """As Prometheus reads it."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(self.name, self.help, labels=["model_name"])
        family.add_metric([model], buckets, self._sum)
        return family


class Metrics(Collector):
    """What was counted in this process, and what the engine says of itself.

    Args:
        model: the label ``model_name`` of every series.
        engines: what runs it.
    """

    def __init__(self, model: str, engines: Engines) -> None:
        self._model = model
        self._engines = engines
        self.prompt_tokens = 0
        self.finished: Counter[str] = Counter()
        self.aborted = 0
        self.first_token = Histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST
        )
        self.inter_token = Histogram(
            "inter_token_latency_seconds",
            "Between two tokens of an answer; where an answer is given whole, its mean for each of them.",
            _SHORT,
        )
        self.whole = Histogram("e2e_request_latency_seconds", "From a request's arrival to its last token.", _LONG)
        self.queued = Histogram(
            "request_queue_time_seconds", "From a request's arrival to its place in the engine's steps.", _LONG
        )
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The series as prometheus_client wants them."""
        stats = self._engines.stats
        if stats is not None:
            yield self._gauge("num_requests_running", "Answers that the engine works on.", stats.running)
            yield self._gauge("num_requests_waiting", "Answers that wait for the engine.", stats.waiting)
            yield self._gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", stats.kv_usage)
            yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prefix_queries)
            yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.prefix_hits)
            yield self._counter("num_preemptions", "Answers put back for want of KV blocks.", stats.preemptions)
            yield self._counter("generation_tokens", "Tokens drawn.", stats.generated_tokens)
            yield self._counter("steps", "Steps of the engines: forwards over all that run.", stats.steps)
        yield self._counter("prompt_tokens", "Tokens of prompts that the engine began.", self.prompt_tokens)
        yield self._counter("requests_aborted", "Prompts that were given up before their end.", self.aborted)
        family = CounterMetricFamily(
            "phalanx:request_success", "Answers that have ended, by why.", labels=["model_name", "finished_reason"]
        )
        for reason in sorted({"stop", "length", *self.finished}):
            family.add_metric([self._model, reason], self.finished[reason])
        yield family
        yield from self._of_each_engine()
        for histogram in (self.first_token, self.inter_token, self.whole, self.queued):
            yield histogram.family(self._model)

    def _of_each_engine(self) -> Iterator[Metric]:
        clients = self._engines.clients
        told = {place: client.stats for place, client in enumerate(clients) if client.stats is not None}
        ready = {place: float(client.state is EngineState.READY) for place, client in enumerate(clients)}
        running = {place: stats.running for place, stats in told.items()}
        waiting = {place: stats.waiting for place, stats in told.items()}
        usage = {place: stats.kv_usage for place, stats in told.items()}
        labels = ["model_name", "engine"]
        for gauge, values in (
            (GaugeMetricFamily("phalanx:engine_up", "Whether an engine takes requests.", labels=labels), ready),
            (GaugeMetricFamily("phalanx:engine_requests_running", "Answers it works on.", labels=labels), running),
            (GaugeMetricFamily("phalanx:engine_requests_waiting", "Answers that wait for it.", labels=labels), waiting),
            (GaugeMetricFamily("phalanx:engine_kv_cache_usage_perc", "Its KV blocks in use.", labels=labels), usage),
        ):
            for place, value in values.items():
                gauge.add_metric([self._model, str(place)], value)
            yield gauge
        restarts = CounterMetricFamily("phalanx:engine_restarts", "How often it was started again.", labels=labels)
        for place, client in enumerate(clients):
            restarts.add_metric([self._model, str(place)], client.restarts)
        yield restarts

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"phalanx:{name}", help, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(f"phalanx:{name}", help, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
