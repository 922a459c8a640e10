"""Plain counters say the same as prometheus_client's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.counting import Count, Distribution

BUCKETS = (0.1, 1.0, 5.0)


def samples(registry: CollectorRegistry) -> set[tuple[str, frozenset[tuple[str, str]], float]]:
    """What a scraper reads, whatever the order of labels."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, frozenset(sample.labels.items()), sample.value)
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.05, 0.1, 0.7, 1.0, 5.0, 9.5])))
)
def test_the_text_is_the_same(events: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    count = Count("a", "text", "x", registry=ours)
    total = Count("b", "text", registry=ours)
    spread = Distribution("c_seconds", "text", "x", buckets=BUCKETS, registry=ours)
    their_count = Counter("a", "text", ("x",), registry=theirs)
    their_total = Counter("b", "text", registry=theirs)
    their_spread = Histogram("c_seconds", "text", ("x",), buckets=BUCKETS, registry=theirs)
    for label, value in events:
        count.add(value, label)
        total.add()
        spread.observe(value, label)
        their_count.labels(label).inc(value)
        their_total.inc()
        their_spread.labels(label).observe(value)
    assert samples(ours) == samples(theirs)


def test_series_of_what_is_gone_are_dropped() -> None:
    count = Count("a", "text", "replica", "kind")
    spread = Distribution("b", "text", "replica", buckets=BUCKETS)
    for replica in ("one", "two"):
        count.add(1, replica, "cut")
        spread.observe(0.5, replica)
    count.forget("one")
    spread.forget("one")
    assert [sample.labels["replica"] for sample in next(iter(count.collect())).samples] == ["two"]
    replicas = {sample.labels["replica"] for sample in next(iter(spread.collect())).samples}
    assert replicas == {"two"}
