"""/metrics under vLLM's names, read from plain counters when they are scraped."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from loadgen.replica.model import EngineModel, EngineStats

_TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_BOUNDS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_TIERS = ("device", "host", "p2p", "disk", "external_unspecified")
_FINISH_REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts by upper bound, in seconds."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, value_s: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value_s)] += times
        self.sum_s += value_s * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts as Prometheus wants them."""
        total = 0
        listed: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, inf), self._counts, strict=True):
            total += count
            listed.append(("+Inf" if bound == inf else repr(float(bound)), total))
        return listed


@dataclass(slots=True)
class RankTimes:
    """What one rank has measured about its requests."""

    ttft: Histogram = field(default_factory=lambda: Histogram(_TTFT_BOUNDS_S))
    inter_token: Histogram = field(default_factory=lambda: Histogram(_TOKEN_BOUNDS_S))
    e2e: Histogram = field(default_factory=lambda: Histogram(_REQUEST_BOUNDS_S))
    queue: Histogram = field(default_factory=lambda: Histogram(_REQUEST_BOUNDS_S))
    prefill: Histogram = field(default_factory=lambda: Histogram(_REQUEST_BOUNDS_S))
    finished: Counter[str] = field(default_factory=Counter)


class RankView(Protocol):
    """What /metrics needs to know of a rank."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def times(self) -> RankTimes: ...
    @property
    def sleep_level(self) -> int | None: ...


class Collector(Protocol):
    """What prometheus_client can collect from."""

    def collect(self) -> Iterable[Metric]: ...


class ReplicaCollector:
    """Prometheus collector over the ranks of one replica."""

    def __init__(self, model_name: str, model: EngineModel, ranks: Sequence[RankView]) -> None:
        self._labels = [(model_name, str(rank)) for rank in range(len(ranks))]
        self._model = model
        self._ranks = ranks

    def collect(self) -> Iterator[Metric]:
        """All families, each with one sample per rank."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._sources()
        yield self._sleep_states()
        yield from self._histograms()
        yield self._finished()
        yield self._config()

    def _gauges(self) -> Iterator[Metric]:
        ranks = self._ranks
        yield self._gauge(
            "num_requests_running", "Requests in the batch.", (r.running for r in ranks)
        )
        yield self._gauge("num_requests_waiting", "Requests that wait.", (r.waiting for r in ranks))
        yield self._gauge(
            "kv_cache_usage_perc", "KV-cache usage, 1 is full.", (r.kv_usage for r in ranks)
        )
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait, by reason.",
            labels=["model_name", "engine", "reason"],
        )
        for labels, rank in zip(self._labels, ranks, strict=True):
            by_reason.add_metric([*labels, "capacity"], rank.waiting)
            by_reason.add_metric([*labels, "deferred"], 0)
        yield by_reason

    def _counters(self) -> Iterator[Metric]:
        stats = [rank.stats for rank in self._ranks]
        listed: tuple[tuple[str, str, Iterable[float]], ...] = (
            ("prefix_cache_queries", "Tokens looked up.", (s.queries for s in stats)),
            ("prefix_cache_hits", "Tokens found.", (s.hits for s in stats)),
            ("prompt_tokens", "Prompt tokens.", (s.prompt for s in stats)),
            ("generation_tokens", "Generated tokens.", (s.generated for s in stats)),
            ("prompt_tokens_cached", "Cached prompt tokens.", (s.cached for s in stats)),
            ("external_prefix_cache_queries", "Tokens asked of a pool.", (0 for _ in stats)),
            ("external_prefix_cache_hits", "Tokens found in a pool.", (0 for _ in stats)),
            ("num_preemptions", "Preemptions.", (s.preemptions_total for s in stats)),
        )
        for name, text, values in listed:
            family = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine"])
            for labels, value in zip(self._labels, values, strict=True):
                family.add_metric(labels, value)
            yield family

    def _sources(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where they came from.",
            labels=["model_name", "engine", "source"],
        )
        for labels, rank in zip(self._labels, self._ranks, strict=True):
            stats = rank.stats
            family.add_metric([*labels, "local_compute"], stats.prompt - stats.cached)
            family.add_metric([*labels, "local_cache_hit"], stats.cached)
            family.add_metric([*labels, "external_kv_transfer"], 0)
        yield family
        yield self._tiers()

    def _tiers(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:prompt_tokens_cached_by_source",
            "Cached prompt tokens by the tier they were in.",
            labels=["model_name", "engine", "source"],
        )
        for labels, rank in zip(self._labels, self._ranks, strict=True):
            for tier in _TIERS:
                family.add_metric([*labels, tier], rank.stats.cached if tier == "device" else 0)
        return family

    def _sleep_states(self) -> Metric:
        family = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "Sleep state of the engine; 1 for the state it is in.",
            labels=["model_name", "engine", "sleep_state"],
        )
        for labels, rank in zip(self._labels, self._ranks, strict=True):
            for state, level in (("awake", None), ("weights_offloaded", 1), ("discard_all", 2)):
                family.add_metric([*labels, state], rank.sleep_level == level)
        return family

    def _histograms(self) -> Iterator[Metric]:
        times = [rank.times for rank in self._ranks]
        listed = (
            ("time_to_first_token_seconds", [t.ttft for t in times]),
            ("inter_token_latency_seconds", [t.inter_token for t in times]),
            ("e2e_request_latency_seconds", [t.e2e for t in times]),
            ("request_queue_time_seconds", [t.queue for t in times]),
            ("request_prefill_time_seconds", [t.prefill for t in times]),
        )
        for name, histograms in listed:
            family = HistogramMetricFamily(
                f"vllm:{name}", "Histogram in seconds.", labels=["model_name", "engine"]
            )
            for labels, histogram in zip(self._labels, histograms, strict=True):
                family.add_metric(list(labels), histogram.buckets(), histogram.sum_s)
            yield family

    def _finished(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success",
            "Finished requests by reason.",
            labels=["model_name", "engine", "finished_reason"],
        )
        for labels, rank in zip(self._labels, self._ranks, strict=True):
            for reason in _FINISH_REASONS:
                family.add_metric([*labels, reason], rank.times.finished[reason])
        return family

    def _config(self) -> Metric:
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Cache configuration.",
            labels=[
                "engine",
                "block_size",
                "num_gpu_blocks",
                "kv_cache_size_tokens",
                "enable_prefix_caching",
                "cache_dtype",
                "prefix_caching_hash_algo",
            ],
        )
        size, blocks = self._model.block_size_tokens, self._model.blocks
        for _, engine in self._labels:
            caching = str(self._model.prefix_caching)
            values = [engine, str(size), str(blocks), str(size * blocks), caching, "auto", "xxhash"]
            family.add_metric(values, 1)
        return family

    def _gauge(self, name: str, text: str, values: Iterable[float]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine"])
        for labels, value in zip(self._labels, values, strict=True):
            family.add_metric(list(labels), value)
        return family


def exposition(collector: Collector) -> bytes:
    """The text format of one scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)
