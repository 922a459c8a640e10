"""/metrics under SGLang's names, as far as those who route by them read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from loadgen.replica.metrics import Histogram, RankView
from loadgen.replica.model import EngineModel

_LABELS = ["model_name", "engine_type", "dp_rank"]
_Read = Callable[[RankView], float]


class SglangCollector:
    """Prometheus collector over the ranks of one replica."""

    def __init__(self, model_name: str, model: EngineModel, ranks: Sequence[RankView]) -> None:
        self._labels = [(model_name, "unified", str(rank)) for rank in range(len(ranks))]
        self._capacity_tokens = model.capacity_tokens
        self._ranks = ranks

    def collect(self) -> Iterator[Metric]:
        """All families, each with one sample per rank."""
        capacity = self._capacity_tokens
        gauges: tuple[tuple[str, str, _Read], ...] = (
            ("num_running_reqs", "Requests in the batch.", lambda r: r.running),
            ("num_queue_reqs", "Requests that wait.", lambda r: r.waiting),
            ("num_used_tokens", "Tokens in use.", lambda r: r.kv_usage * capacity),
            ("token_usage", "Share of the tokens in use.", lambda r: r.kv_usage),
            ("cache_hit_rate", "Share of prompt tokens found.", _hit_rate),
        )
        counters: tuple[tuple[str, str, _Read], ...] = (
            ("prompt_tokens", "Prompt tokens.", lambda r: r.stats.prompt),
            ("generation_tokens", "Generated tokens.", lambda r: r.stats.generated),
            ("cached_tokens", "Prompt tokens found.", lambda r: r.stats.cached),
        )
        for name, text, read in gauges:
            yield self._filled(GaugeMetricFamily(f"sglang:{name}", text, labels=_LABELS), read)
        for name, text, read in counters:
            yield self._filled(CounterMetricFamily(f"sglang:{name}", text, labels=_LABELS), read)
        yield self._histogram("time_to_first_token_seconds", lambda r: r.times.ttft)
        yield self._histogram("inter_token_latency_seconds", lambda r: r.times.inter_token)
        yield self._histogram("e2e_request_latency_seconds", lambda r: r.times.e2e)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, read: _Read) -> Metric:
        for labels, rank in zip(self._labels, self._ranks, strict=True):
            family.add_metric(labels, read(rank))
        return family

    def _histogram(self, name: str, read: Callable[[RankView], Histogram]) -> Metric:
        family = HistogramMetricFamily(f"sglang:{name}", "Histogram in seconds.", labels=_LABELS)
        for labels, rank in zip(self._labels, self._ranks, strict=True):
            histogram = read(rank)
            family.add_metric(list(labels), histogram.buckets(), histogram.sum_s)
        return family


def _hit_rate(rank: RankView) -> float:
    return rank.stats.cached / rank.stats.prompt if rank.stats.prompt else 0.0
