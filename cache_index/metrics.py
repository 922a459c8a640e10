"""What the index tells Prometheus, read at scrape time from where it is counted anyway.

Labels are bounded: replicas and ranks are those declared by the gateway, everything else comes from
fixed sets of words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cache_index.indexer import Indexer
from cache_index.mirror import Mirror
from cache_index.runner import SourceRunner
from cache_index.source_metrics import listener_metrics, source_metrics

__all__ = ["IndexCollector"]


class IndexCollector(Collector):
    """Counters of sources, writer, mirror and matches."""

    def __init__(
        self, indexer: Indexer, mirror: Mirror, matches: Counter[str], available: Callable[[], bool]
    ) -> None:
        self._indexer = indexer
        self._mirror = mirror
        self._matches = matches
        self._available = available

    def describe(self) -> Iterable[Metric]:
        """Nothing up front: what exists depends on the declared sources."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from source_metrics(self._indexer)
        yield from listener_metrics(self._indexer)
        yield from self._fleet()
        yield from self._index()

    def _fleet(self) -> Iterator[Metric]:
        runners = list(self._indexer.runners.values())
        yield _counter(
            "kvroute_source_events",
            "Events by what became of them",
            "event",
            _total(runners, lambda runner: runner.state.ledger.counts),
        )
        yield _counter(
            "kvroute_index_writer",
            "Calls and remedies of the writers",
            "kind",
            _total(runners, lambda runner: runner.writer.counts),
        )

    def _index(self) -> Iterator[Metric]:
        mirror = self._mirror
        gauges = (
            ("kvroute_index_available", "1 if matches are answered", float(self._available())),
            ("kvroute_index_lag_seconds", "Age of the mirror", mirror.lag_s),
            ("kvroute_index_units", "Base units in the mirror", mirror.radix.units),
            ("kvroute_index_nodes", "Runs in the mirror", mirror.radix.nodes),
            ("kvroute_index_holders", "Live holders in the mirror", mirror.radix.holders),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(name, text, value=value)
        yield _counter("kvroute_index_calls", "Calls on Redis", "status", self._indexer.counts)
        yield _counter("kvroute_index_matches", "Matches by result", "result", self._matches)
        yield _counter(
            "kvroute_index_mirror",
            "What the mirror did",
            "kind",
            Counter(
                snapshots=mirror.snapshots,
                changes=mirror.changes,
                failures=mirror.failures,
                refused_units=mirror.radix.refused_units,
            ),
        )


def _total(
    runners: Iterable[SourceRunner], counts: Callable[[SourceRunner], Counter[str]]
) -> Counter[str]:
    total: Counter[str] = Counter()
    for runner in runners:
        total.update(dict(counts(runner)))
    return total


def _counter(name: str, text: str, label: str, counts: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=(label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family
