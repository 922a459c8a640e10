"""When a replica may get a request: breakers, outliers, and the fleet that heeds them."""

from __future__ import annotations

import math
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.breaker import Breaker, BreakerRules, Outcome, State
from router.config import ReplicaConfig, Settings
from router.engines import served_models
from router.load import FleetLoad, Ticket
from router.outliers import (
    WINDOW_S,
    Kind,
    OutlierRules,
    Standing,
    Traffic,
    ejection_s,
    excess,
    next_repeats,
    outliers,
)
from router.replicas import STATES, Fleet, Replica

MODELS = served_models({"data": [{"id": "sim"}, {"id": "tuned", "parent": "sim"}]})


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def breaker(**rules: float) -> tuple[Breaker, Clock, list[State]]:
    clock, seen = Clock(), list[State]()
    made = Breaker(BreakerRules(**rules), clock, seen.append)  # type: ignore[arg-type]
    return made, clock, seen


# The breaker


def test_failures_in_a_row_open_it_and_an_answer_between_them_does_not() -> None:
    one, _, _ = breaker()
    for _ in range(2):
        one.failed()
        one.failed()
        one.succeeded()
    assert one.state is State.CLOSED
    for _ in range(3):
        one.failed()
    assert (one.state, one.allowance) == (State.OPEN, 0)


def test_a_refused_connection_opens_it_until_a_probe_succeeds() -> None:
    one, clock, seen = breaker()
    one.refused()
    clock.now_s += 3600
    one.advance()
    assert (one.state, one.next_change_s) == (State.OPEN, math.inf)
    one.probe_succeeded()
    assert (one.state, one.allowance) == (State.HALF_OPEN, 1)
    one.succeeded()
    assert seen == [State.OPEN, State.HALF_OPEN, State.SLOW_START]


def test_a_short_wait_is_enough_where_nothing_speaks_against_the_replica() -> None:
    one, clock, _ = breaker(wait_s=1.0)
    for _ in range(3):
        one.failed()
    clock.now_s += 0.99
    one.advance()
    assert one.state is State.OPEN
    clock.now_s = one.next_change_s
    one.advance()
    assert one.state is State.HALF_OPEN


def test_each_failed_trial_doubles_the_wait_though_probes_succeed_up_to_a_bound() -> None:
    one, clock, _ = breaker(wait_s=1.0, max_wait_s=5.0)
    for _ in range(3):
        one.failed()
    one.probe_succeeded()
    waits_s = []
    for _ in range(5):
        one.failed()
        one.probe_succeeded()
        assert one.state is State.OPEN
        waits_s.append(one.next_change_s - clock.now_s)
        clock.now_s = one.next_change_s
        one.advance()
    assert waits_s == [1, 2, 4, 5, 5]


def test_a_new_life_does_not_pay_for_the_failed_trials_of_the_one_before() -> None:
    one, _, _ = breaker()
    one.refused()
    for _ in range(4):
        one.probe_succeeded()
        one.failed()
        one.refused()
    one.probe_succeeded()
    assert one.state is State.HALF_OPEN


def test_slow_start_grows_and_ends() -> None:
    one, clock, _ = breaker(slow_start_s=10.0)
    one.start_slowly()
    allowed = []
    for _ in range(10):
        allowed.append(one.allowance)
        clock.now_s += 1
    assert allowed == sorted(allowed)
    assert (allowed[0], allowed[5], allowed[9]) == (1, 8, 42)
    one.advance()
    assert (one.state, one.allowance) == (State.CLOSED, math.inf)


def test_without_slow_start_a_passed_trial_closes_it() -> None:
    one, _, seen = breaker(slow_start_s=0)
    one.start_slowly()
    assert seen == []
    one.refused()
    one.probe_succeeded()
    one.succeeded()
    assert one.state is State.CLOSED


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, Outcome.OK),
        (304, Outcome.OK),
        (400, Outcome.CLIENT_ERROR),
        (404, Outcome.CLIENT_ERROR),
        (429, Outcome.CLIENT_ERROR),
        (500, Outcome.SERVER_ERROR),
        (501, Outcome.CLIENT_ERROR),
        (503, Outcome.SERVER_ERROR),
    ],
)
def test_what_a_status_says_of_the_replica(status: int, outcome: Outcome) -> None:
    assert Outcome.of_status(status) is outcome


# Outliers


def group(**members: tuple[int, int, float | None] | None) -> list[Standing]:
    """Requests, errors, TTFT of each; None is one that is ejected."""
    return [
        Standing(name, 0, 0, None, 5.0) if each is None else Standing(name, *each, None)
        for name, each in members.items()
    ]


RULES = OutlierRules()


@pytest.mark.parametrize(
    ("members", "found"),
    [
        ({"a": (20, 20, None)}, {}),  # alone: where else should requests go
        ({"a": (20, 20, None), "b": (20, 0, None)}, {"a": Kind.ERRORS}),
        ({"a": (9, 9, None), "b": (20, 0, None)}, {}),  # too few to tell
        ({"a": (20, 9, None), "b": (20, 0, None)}, {}),
        ({"a": (20, 20, None), "b": (20, 19, None)}, {}),  # the requests are at fault
        ({"a": (20, 20, None), "b": (20, 20, None), "c": (20, 0, None)}, {"a": Kind.ERRORS}),
        ({"a": (20, 20, None), "b": None, "c": (20, 0, None)}, {}),  # one of three is out
        ({"a": (20, 0, 9.0), "b": (20, 0, 1.0)}, {"a": Kind.LATENCY}),
        ({"a": (20, 0, 4.0), "b": (20, 0, 1.0)}, {}),
        ({"a": (20, 0, 0.9), "b": (20, 0, 0.01)}, {}),  # slower, but not slow
        ({"a": (20, 0, 9.0), "b": (20, 0, None)}, {}),  # nobody to compare with
        (
            {"a": (20, 0, 99.0), "b": (20, 15, 1.0), "c": (20, 0, 1.0), "d": (20, 0, 1.0)},
            {"b": Kind.ERRORS, "a": Kind.LATENCY},
        ),
    ],
)
def test_who_is_an_outlier(members: dict[str, tuple[int, int, float | None] | None], found) -> None:
    assert outliers(group(**members), RULES) == found


def test_each_kind_can_be_switched_off() -> None:
    both = group(a=(20, 20, 1.0), b=(20, 0, 99.0), c=(20, 0, 1.0), d=(20, 0, 1.0))
    assert outliers(both, OutlierRules(error_share=0)) == {"b": Kind.LATENCY}
    assert outliers(both, OutlierRules(ttft_factor=0)) == {"a": Kind.ERRORS}


def test_ejections_grow_longer_and_are_forgiven() -> None:
    assert [ejection_s(n, RULES) for n in (1, 2, 3, 6, 1000)] == [10, 20, 40, 300, 300]
    assert next_repeats(0, 0, RULES) == 1
    assert next_repeats(3, 59, RULES) == 4
    assert next_repeats(3, 130, RULES) == 2
    assert next_repeats(3, 1e9, RULES) == 1


standings = st.builds(
    lambda number, requests, errors, ttft_s, since_s: Standing(
        str(number), requests, min(errors, requests), ttft_s, since_s
    ),
    st.integers(0, 40),
    st.integers(0, 50),
    st.integers(0, 50),
    st.none() | st.floats(0, 100),
    st.none() | st.floats(0, 100),
)


@given(st.lists(standings, max_size=12, unique_by=lambda each: each.name))
def test_at_most_half_of_a_group_is_ejected_whatever_it_looks_like(members: list[Standing]) -> None:
    back = set(excess(members))
    then = [each._replace(ejected_since_s=None) if each.name in back else each for each in members]
    new = outliers(then, RULES)
    out = {each.name for each in then if each.ejected_since_s is not None}
    assert not out & new.keys()
    assert len(out) + len(new) <= len(members) // 2


def test_only_the_latest_seconds_count() -> None:
    clock = Clock()
    traffic = Traffic(clock)
    for _ in range(40):
        traffic.add(failed=True)
        traffic.add_ttft(2.0)
        clock.now_s += 1
    seen = traffic.standing("a", None, least_ttfts=20)
    assert (seen.requests, seen.errors, seen.ttft_s) == (WINDOW_S, WINDOW_S, 2.0)
    clock.now_s += WINDOW_S
    assert traffic.standing("a", None, least_ttfts=20) == ("a", 0, 0, None, None)


# The fleet


class Made:
    """A fleet with a clock of its own; every replica has passed a probe."""

    def __init__(self, *names: str, rules: OutlierRules = RULES, **given: float) -> None:
        self.clock = Clock()
        self.load = FleetLoad(1000.0, self.clock)
        self.settings = Settings(**given)  # type: ignore[arg-type]
        self.fleet = Fleet((), self.load, rules, self.clock)
        for name in names:
            self.add(name)

    def add(self, name: str) -> Replica:
        config = ReplicaConfig(url=f"http://{name}:1", name=name)
        replica = Replica.from_config(config, self.settings, self.clock)
        self.fleet.add(replica)
        replica.learned(MODELS, (), (0, 1))
        replica.passed(sleeping=False)
        return replica

    def __getitem__(self, name: str) -> Replica:
        return self.fleet.replicas[name]

    def serving(self, model: str | None = "sim", **kw) -> list[str]:
        return sorted(replica.name for replica in self.fleet.serving(model, **kw))

    def request(self, name: str, rank: int = 0) -> Ticket:
        return self.load.rank(name, rank).take(10, True)


def test_whoever_is_not_well_gets_nothing() -> None:
    made = Made("up", "down", "asleep", "drained")
    made["down"].failed("gone")
    made["asleep"].passed(sleeping=True)
    made.fleet.drain(made["drained"])
    assert made.serving() == made.serving("tuned") == made.serving(None) == ["up"]
    assert made.serving("other") == []
    states = [made[name].state for name in ("up", "down", "asleep", "drained")]
    assert states == ["up", "down", "sleeping", "draining"]
    assert set(states) <= set(STATES)
    made.fleet.undrain(made["drained"])
    made["asleep"].passed(sleeping=False)
    assert made.serving() == ["asleep", "drained", "up"]
    assert made["asleep"].state == "slow_start"


def test_a_returning_replica_gets_one_trial_at_a_time_then_more_and_more() -> None:
    made = Made("a", "b", slow_start_s=10)
    with ExitStack() as old:
        for _ in range(5):  # streams that outlive the trouble are no trials
            old.enter_context(made.request("b"))
        made["b"].failed("refused")
        assert made.serving() == ["a"]
        made["b"].passed(sleeping=False)
        assert made.serving() == ["a", "b"]
        with made.request("b", 1):
            assert made.serving() == ["a"]
        assert made.serving() == ["a", "b"]  # the trial was abandoned: the next one
        with made.request("b"):
            made["b"].began(0.1)
            assert (made["b"].state, made.serving()) == ("slow_start", ["a"])
            made.clock.now_s += 5
            assert made.serving() == ["a", "b"]
            made["b"].report(Outcome.OK)
        made.clock.now_s += 6
        made.fleet.refresh()
        assert made["b"].state == "up"


def test_a_request_is_rather_tried_than_refused() -> None:
    made = Made("a", "b", "c")
    made["a"].failed("gone")
    made["a"].passed(sleeping=False)
    made["b"].failed("gone")
    for _ in range(3):
        made["c"].report(Outcome.CUT)
    with made.request("a"):
        assert made.serving() == ["a"]  # beyond its allowance, before one that breaks requests
        assert made.serving(without={"a"}) == ["c"]
        assert made.serving(only="a") == ["a"]
    assert made.serving(without={"a", "c"}) == []
    assert made.serving(only="b") == []


def test_errors_of_clients_and_clients_that_leave_count_for_nothing() -> None:
    made = Made("a", "b")
    for _ in range(50):
        for status in (400, 404, 429, 501):
            made["a"].report(Outcome.of_status(status))
        made["a"].report(Outcome.ABANDONED)
    made.fleet.judge()
    assert made["a"].state == "up"
    for _ in range(2):
        made["a"].report(Outcome.CUT)
    made["a"].report(Outcome.ABANDONED)
    made["a"].report(Outcome.TIMEOUT)
    assert made["a"].state == "open"


def test_an_outlier_is_ejected_comes_back_slowly_and_stays_out_longer_next_time() -> None:
    made = Made("a", "b", "c")
    lasted_s = []
    for _ in range(3):
        for name in "bc":
            for _ in range(20):
                made[name].report(Outcome.OK)
        for _ in range(20):
            made["a"].report(Outcome.SERVER_ERROR)
        assert [each.name for each in made.fleet.judge()] == ["a"]
        assert (made["a"].state, made.serving()) == ("ejected", ["b", "c"])
        lasted_s.append(made["a"].ejection.until_s - made.clock.now_s)
        made.clock.now_s = made["a"].ejection.until_s
        assert made.serving() == ["a", "b", "c"]
        assert made["a"].state == "slow_start"
        assert made.fleet.judge() == []  # what it was ejected for is forgotten
    assert lasted_s == [10, 20, 40]
    assert made.fleet.ejections[Kind.ERRORS] == 3


def test_a_slow_replica_is_ejected_by_its_first_tokens() -> None:
    made = Made("a", "b", "c")
    for name, ttft_s in (("a", 0.2), ("b", 0.3), ("c", 5.0)):
        for _ in range(20):
            made[name].report(Outcome.OK, ttft_s)
    assert [each.name for each in made.fleet.judge()] == ["c"]
    assert made.fleet.ejections[Kind.LATENCY] == 1


def test_when_the_fleet_shrinks_the_ejected_are_let_in() -> None:
    made = Made("a", "b", "c", "d")
    for name in "cd":
        for _ in range(20):
            made[name].report(Outcome.OK)
            made["a"].report(Outcome.SERVER_ERROR)
    made.fleet.judge()
    assert made["a"].state == "ejected"
    for name in "bcd":
        made.fleet.remove(made[name])
    assert made.serving() == ["a"]
    assert made["a"].state == "slow_start"


def test_a_replica_that_comes_back_under_its_name_has_a_load_of_its_own() -> None:
    made = Made("a", "b")
    retired = []
    made.fleet.on_retired.append(retired.append)
    with made.request("a") as old:
        first = made["a"]
        made.fleet.remove(first)
        assert made["a"].draining  # it waits for its request
        made.fleet.remove(first, force=True)
        assert "a" not in made.fleet.replicas and retired == []
        made.add("a")
        with made.request("a"):
            assert made.load.rank("a", 0).running == 1
            old.first_token()
        assert made.load.rank("a", 0).running == 0
        assert made["a"].inflight.running == 0
    assert retired == [first]
    assert made.load.rank("a", 0).running == 0
    assert first.inflight.running == 0


def test_a_draining_replica_goes_with_its_last_request_unless_that_is_taken_back() -> None:
    made = Made("a", "b")
    removed = []
    made.fleet.on_removed.append(removed.append)
    with made.request("a"):
        made.fleet.remove(made["a"])
        made.fleet.undrain(made["a"])
    assert removed == [] and made.serving() == ["a", "b"]
    first = made["a"]
    with made.request("a"), made.request("a", 1):
        made.fleet.remove(first)
        assert made.serving() == ["b"]
    assert removed == [first]
    assert ("a", 0) not in made.load.ranks()


ACTIONS = (
    *("send", "send", "send", "end", "end", "probe", "fail", "sleep", "wait", "judge"),
    *("burst", "burst", "judge", "drain", "undrain", "remove", "force", "add"),
)
steps_taken = st.lists(
    st.tuples(
        st.sampled_from(ACTIONS),
        st.sampled_from("abc"),
        st.sampled_from(list(Outcome)),
        st.floats(0.01, 8),
    ),
    max_size=80,
)


def change(fleet: Fleet, action: str, replica: Replica) -> None:
    if action in ("probe", "sleep"):
        replica.passed(sleeping=action == "sleep")
    elif action == "fail":
        replica.failed("gone")
    elif action == "drain":
        fleet.drain(replica)
    elif action == "undrain":
        fleet.undrain(replica)
    elif action in ("remove", "force"):
        fleet.remove(replica, force=action == "force")


def send(made: Made, number: int) -> tuple[Replica, Ticket] | None:
    found = made.fleet.serving("sim")
    if not found:
        return None
    chosen = found[number % len(found)]
    if any(each.state == "up" for each in found):
        assert chosen.inflight.recent < chosen.breaker.allowance
        assert chosen.state in ("up", "half_open", "slow_start")
    return chosen, made.request(chosen.name).__enter__()


@settings(max_examples=200, deadline=None)
@given(steps_taken)
def test_whatever_happens_the_fleet_keeps_its_promises(steps: list) -> None:
    quick = OutlierRules(least_requests=1, least_ttfts=2, ttft_factor=1.5)  # so that it happens
    made = Made("a", "b", "c", rules=quick)
    running: list[tuple[Replica, Ticket]] = []
    for action, name, outcome, seconds in steps:
        replica = made.fleet.replicas.get(name)
        if action == "send":
            sent = send(made, int(seconds * 100))
            running += [sent] if sent is not None else []
        elif action == "end" and running:
            ended, ticket = running.pop(int(seconds * 100) % len(running))
            ended.report(outcome, seconds)
            ticket.__exit__(None, None, None)
        elif action == "wait":
            made.clock.now_s += seconds
        elif action == "burst" and replica is not None:
            for _ in range(4):
                replica.report(outcome, seconds)
        elif action == "judge":
            made.fleet.judge()
        elif action == "add" and replica is None:
            made.add(name)
        elif replica is not None:
            change(made.fleet, action, replica)
        made.fleet.refresh()
        check(made)
    for ended, ticket in running:
        ended.report(Outcome.ABANDONED)
        ticket.__exit__(None, None, None)
    assert all(load.running == 0 for load in made.load.ranks().values())
    for each in made.fleet.replicas.values():
        assert each.inflight.running == each.inflight.recent == 0


def check(made: Made) -> None:
    members = list(made.fleet.replicas.values())
    assert all(0 <= each.inflight.recent <= each.inflight.running for each in members)
    assert all(load.running >= 0 for load in made.load.ranks().values())
    usable = [each for each in members if each.healthy or each.state == "ejected"]
    assert sum(each.state == "ejected" for each in usable) <= len(usable) / 2
    served = made.fleet.serving("sim")
    assert not {each.state for each in served} & {"down", "sleeping", "draining"}
    if any(each.state == "up" for each in members):
        assert all(each.admits and each.healthy for each in served)
    assert bool(served) == any(
        each.state not in ("down", "sleeping", "draining") for each in members
    )


def test_an_outage_is_retried_after_as_long_again_as_it_has_lasted_within_bounds() -> None:
    made = Made("a", "b")
    made["a"].failed("gone")
    said = []
    for passed_s in (0.2, 4.0, 20.0, 3600.0):
        made.clock.now_s += passed_s
        said.append(made.fleet.retry_after_s("sim", only="a"))
    assert said == [1, 5, 25, 30]
    made["b"].failed("gone")
    assert made.fleet.retry_after_s("sim") == 1  # the younger outage may be over first
    made["a"].failed("still gone")
    assert made.fleet.retry_after_s("sim", only="a") == 30
    made["b"].passed(sleeping=True)  # nobody knows when it will be woken
    assert made.fleet.retry_after_s("sim", only="b") == 1
