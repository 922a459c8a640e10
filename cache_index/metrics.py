"""What the index tells Prometheus, read at scrape time from where it is counted anyway.

Labels are bounded: replicas and ranks are those declared by the gateway, everything else comes from
fixed sets of words.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cache_index.indexer import Indexer
from cache_index.mirror import Mirror
from cache_index.runner import SourceRunner
from cache_index.types import Trust

__all__ = ["IndexCollector"]

_TRUST_VALUE = {Trust.EXACT: 2, Trust.PARTIAL: 1, Trust.NONE: 0}
_SOURCE = ("replica", "rank")


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
        yield from self._sources()
        yield from self._index()

    def _sources(self) -> Iterator[Metric]:
        now_s = time.monotonic()
        trust = GaugeMetricFamily(
            "kvroute_source_trust", "2 exact, 1 partial, 0 none", labels=_SOURCE
        )
        leading = GaugeMetricFamily(
            "kvroute_source_leading", "1 if this process writes the source", labels=_SOURCE
        )
        blocks = GaugeMetricFamily(
            "kvroute_source_blocks", "Engine blocks known of a source", labels=_SOURCE
        )
        batches = CounterMetricFamily(
            "kvroute_source_batches", "Event batches applied", labels=_SOURCE
        )
        incidents = CounterMetricFamily(
            "kvroute_source_incidents",
            "Gaps, restarts, duplicates, dropped states, failed replays",
            labels=(*_SOURCE, "kind"),
        )
        for runner in self._indexer.runners.values():
            labels = (runner.spec.replica, str(runner.spec.rank))
            trust.add_metric(labels, _TRUST_VALUE[runner.state.trust(now_s)[0]])
            leading.add_metric(labels, float(runner.writer.token > 0))
            blocks.add_metric(labels, len(runner.state.ledger))
            batches.add_metric(labels, runner.state.batches)
            for kind, count in runner.state.counts.items():
                incidents.add_metric((*labels, kind), count)
        yield from (trust, leading, blocks, batches, incidents)
        yield from self._fleet()

    def _fleet(self) -> Iterator[Metric]:
        runners = self._indexer.runners.values()
        yield _counter(
            "kvroute_source_events",
            "Events by what became of them",
            "event",
            _total(runners, lambda runner: runner.state.ledger.counts),
        )
        yield _counter(
            "kvroute_source_decode_failures",
            "Messages and events that could not be read",
            "reason",
            _total(runners, lambda runner: runner.intake.failures),
        )
        yield _counter(
            "kvroute_source_connection",
            "Connections, replays, unknown tags and fields",
            "kind",
            _total(runners, lambda runner: runner.intake.counts),
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
        total.update(counts(runner))
    return total


def _counter(name: str, text: str, label: str, counts: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=(label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family
