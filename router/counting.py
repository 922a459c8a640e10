"""Counters and histograms for the request path: plain numbers, put in form when scraped.

prometheus_client's own take a lock and a look-up of labels at every step, several microseconds a
request. These are written by the event loop alone; a scrape reads a copy from its own thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Count(Collector):
    """A counter, with or without labels."""

    def __init__(
        self, name: str, text: str, *labels: str, registry: CollectorRegistry | None = None
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}
        if registry is not None:
            registry.register(self)

    def add(self, amount: float = 1.0, *labels: str) -> None:
        """Count `amount` more for these label values."""
        values = self._values
        values[labels] = values.get(labels, 0.0) + amount

    def forget(self, value: str) -> None:
        """Drop the series whose first label has this value."""
        for labels in [each for each in self._values if each and each[0] == value]:
            del self._values[labels]

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Called by a scrape."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in self._values.copy().items():
            family.add_metric(labels, value)
        return [family]


class Distribution(Collector):
    """A histogram with upper bounds `buckets`, with or without labels."""

    def __init__(
        self,
        name: str,
        text: str,
        *labels: str,
        buckets: tuple[float, ...],
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._name, self._text, self._labels, self._buckets = name, text, labels, buckets
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        if registry is not None:
            registry.register(self)

    def observe(self, value: float, *labels: str) -> None:
        """One more value."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * (len(self._buckets) + 1)
            self._sums[labels] = 0.0
        counts[bisect_left(self._buckets, value)] += 1
        self._sums[labels] += value

    def forget(self, value: str) -> None:
        """Drop the series whose first label has this value."""
        for labels in [each for each in self._counts if each and each[0] == value]:
            del self._counts[labels], self._sums[labels]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Called by a scrape; buckets are cumulative on the wire."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, counts in self._counts.copy().items():
            total = 0
            buckets = []
            for bound, count in zip((*self._buckets, float("inf")), list(counts), strict=True):
                total += count
                name: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
                buckets.append((name, total))
            family.add_metric(labels, buckets, self._sums.get(labels, 0.0))
        return [family]
