"""The gateway's own metrics, all under the prefix kvroute_. Labels are bounded by construction."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.counting import Count, Distribution
from router.load import FleetLoad
from router.replicas import STATES, Fleet

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0)
ROUTING_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 0.25, 1.0)


class Metrics:
    """Counters of the request path. Model names are not labels: clients choose them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Count(
            "kvroute_requests",
            "Requests by route and status code of the answer; 499: the client left.",
            "route",
            "code",
            registry=registry,
        )
        self.ttft_s = Distribution(
            "kvroute_ttft_seconds",
            "From the last byte of a streaming request to the first byte of its answer's body.",
            "replica",
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.routing_s = Distribution(
            "kvroute_routing_seconds",
            "From the last byte of a request to the decision: tokenizing, matching, choosing.",
            buckets=ROUTING_BUCKETS_S,
            registry=registry,
        )
        self.prompts = Count(
            "kvroute_prompts",
            "Prompts by how their token ids were had: local, replica, given, none.",
            "source",
            registry=registry,
        )
        self.prompt_tokens = Count(
            "kvroute_prompt_tokens", "Prompt tokens of routed requests.", registry=registry
        )
        self.matched_tokens = Count(
            "kvroute_matched_tokens",
            "Prompt tokens predicted to be reused where the request was sent.",
            registry=registry,
        )
        self.cached_tokens = Count(
            "kvroute_cached_tokens",
            "Prompt tokens the engine said it reused, where it says so.",
            registry=registry,
        )
        self.misprediction_tokens = Count(
            "kvroute_misprediction_tokens",
            "Difference of predicted and reported reuse, by direction: over, under.",
            "direction",
            registry=registry,
        )
        self.upstream_failures = Count(
            "kvroute_upstream_failures",
            "Attempts that failed at a replica, by kind: unavailable, cut, timeout, refused.",
            "replica",
            "kind",
            registry=registry,
        )
        self.retries = Count(
            "kvroute_retries", "Requests sent again before their first byte.", registry=registry
        )

    def forget(self, replica: str) -> None:
        """A replica is gone, and so are its labels."""
        self.ttft_s.forget(replica)
        self.upstream_failures.forget(replica)


class FleetCollector(Collector):
    """Gauges read off the fleet and its load when scraped."""

    def __init__(self, fleet: Fleet, load: FleetLoad) -> None:
        self._fleet = fleet
        self._load = load

    def collect(self) -> Iterable[Metric]:
        """State of each replica, load of each rank, and what the fleet has been through.

        Called from a thread of its own: the fleet may change meanwhile, so its list is copied.
        """
        up = GaugeMetricFamily("kvroute_replica_up", "1: takes requests.", labels=("replica",))
        state = GaugeMetricFamily(
            "kvroute_replica_state", "1 for the state it is in.", labels=("replica", "state")
        )
        for replica in list(self._fleet.replicas.values()):
            up.add_metric((replica.name,), float(replica.healthy))
            now = replica.state
            for each in STATES:
                state.add_metric((replica.name, each), float(each == now))
        yield up
        yield state
        yield from self._incidents()
        yield from self._load_gauges()

    def _incidents(self) -> Iterable[Metric]:
        transitions = CounterMetricFamily(
            "kvroute_breaker_transitions", "Breakers of replicas, by new state.", labels=("state",)
        )
        for state, count in self._fleet.transitions.items():
            transitions.add_metric((state,), count)
        ejections = CounterMetricFamily(
            "kvroute_ejections", "Replicas ejected as outliers, by kind.", labels=("kind",)
        )
        for kind, count in self._fleet.ejections.items():
            ejections.add_metric((kind,), count)
        return transitions, ejections

    def _load_gauges(self) -> Iterable[GaugeMetricFamily]:
        labels = ("replica", "rank")
        running = GaugeMetricFamily("kvroute_running_requests", "In flight.", labels=labels)
        queued = GaugeMetricFamily(
            "kvroute_queued_prefill_tokens", "Uncached tokens not yet prefilled.", labels=labels
        )
        rate = GaugeMetricFamily(
            "kvroute_prefill_seconds_per_token", "Learned cost of a token.", labels=labels
        )
        fixed = GaugeMetricFamily(
            "kvroute_prefill_fixed_seconds", "Learned cost of any prefill.", labels=labels
        )
        for (replica, rank), load in self._load.ranks().items():
            if replica not in self._fleet.replicas:
                continue
            names = (replica, str(rank))
            running.add_metric(names, load.running)
            queued.add_metric(names, load.queued_tokens)
            rate.add_metric(names, load.prefill.s_per_token)
            fixed.add_metric(names, load.prefill.fixed_s)
        return running, queued, rate, fixed
