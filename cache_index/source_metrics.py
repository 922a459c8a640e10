"""What each source and each bound socket tells Prometheus.

Read in another thread than the one that counts, so everything is copied before it is walked.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cache_index.indexer import Indexer
from cache_index.runner import SourceRunner
from cache_index.types import Trust

__all__ = ["listener_metrics", "source_metrics"]

_TRUST_VALUE = {Trust.EXACT: 2, Trust.PARTIAL: 1, Trust.NONE: 0}
_SOURCE = ("replica", "rank")
_OF_LISTENER = ("endpoint",)


def source_metrics(indexer: Indexer) -> Iterator[Metric]:
    """Everything that is known source by source; replica and rank are the gateway's own words."""
    families = _Families()
    now_s = time.monotonic()
    for runner in list(indexer.runners.values()):
        families.add(runner, now_s)
    yield from families.all()


class _Families:
    """The families while they are being filled."""

    def __init__(self) -> None:
        self._levels = Counter(dict.fromkeys(Trust, 0))
        self._trust = _gauge("trust", "2 exact, 1 partial, 0 none")
        self._leading = _gauge("leading", "1 if this process writes the source")
        self._blocks = _gauge("blocks", "Engine blocks known of a source")
        self._lag = _gauge(
            "lag_seconds", "Age of the last live batch when it was taken, by the engine's clock"
        )
        self._batches = _counter("batches", "Event batches applied")
        self._incidents = _counter(
            "incidents",
            "Gaps, restarts, duplicates, orphans, dropped states, failed replays",
            "kind",
        )
        self._failures = _counter(
            "decode_failures", "Messages and events that could not be read", "reason"
        )
        self._connection = _counter(
            "connection", "Connections, replays, resets, conflicts, unknown tags and fields", "kind"
        )

    def add(self, runner: SourceRunner, now_s: float) -> None:
        labels = (runner.spec.replica, str(runner.spec.rank))
        state, intake = runner.state, runner.intake
        level = state.trust(now_s)[0]
        self._levels[level] += 1
        self._trust.add_metric(labels, _TRUST_VALUE[level])
        self._leading.add_metric(labels, float(runner.writer.token > 0))
        self._blocks.add_metric(labels, len(state.ledger))
        self._batches.add_metric(labels, state.batches)
        if intake.lag_s is not None:
            self._lag.add_metric(labels, intake.lag_s)
        orphaned = {"orphaned": state.ledger.counts["orphaned"]}
        for family, counts in (
            (self._incidents, {**state.counts, **orphaned}),
            (self._failures, dict(intake.failures)),
            (self._connection, dict(intake.counts)),
        ):
            for word, count in counts.items():
                family.add_metric((*labels, word), count)

    def all(self) -> Iterator[Metric]:
        yield from (self._trust, self._leading, self._blocks, self._lag, self._batches)
        yield from (self._incidents, self._failures, self._connection)
        by_level = GaugeMetricFamily("kvroute_sources", "Sources by trust", labels=("trust",))
        for level, count in self._levels.items():
            by_level.add_metric((str(level),), count)
        yield by_level


def listener_metrics(indexer: Indexer) -> Iterator[Metric]:
    """The sockets that publishers dial; endpoints are the gateway's own."""
    bound = GaugeMetricFamily(
        "kvroute_listener_bound", "1 if publishers can dial it", labels=_OF_LISTENER
    )
    connections = GaugeMetricFamily(
        "kvroute_listener_connections", "Connections to it", labels=_OF_LISTENER
    )
    unknown = CounterMetricFamily(
        "kvroute_listener_unknown_topic",
        "Messages under a topic that no source has",
        labels=_OF_LISTENER,
    )
    for each in indexer.listeners():
        bound.add_metric((each.endpoint,), float(each.bound))
        connections.add_metric((each.endpoint,), each.connections)
        unknown.add_metric((each.endpoint,), each.counts.get("unknown_topic", 0))
    yield from (bound, connections, unknown)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvroute_source_{name}", text, labels=_SOURCE)


def _counter(name: str, text: str, *more: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvroute_source_{name}", text, labels=(*_SOURCE, *more))
