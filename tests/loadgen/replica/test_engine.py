from collections import Counter
from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.replica.engine import (
    Engine,
    EngineModel,
    EngineRequest,
    SchedulingPolicy,
    reply_tokens,
)
from loadgen.replica.errors import DuplicateRequest, EngineError, RequestTooLong
from loadgen.replica.events import BlockRemoved, BlocksCleared, BlocksStored, KVEvent
from loadgen.replica.reply import Vocabulary

SMALL = EngineModel(
    block_size_tokens=4, blocks=12, max_batched_tokens=16, max_num_seqs=4,
    prefill_c_s=0.5, prefill_a_s=0.01, prefill_b_s=0.001, decode_step_s=0.1,
    decode_per_request_s=0.01,
)  # fmt: skip


def request(name: str, prompt: list[int], tokens: int = 3, **fields: object) -> EngineRequest:
    return EngineRequest(name, prompt, tokens, **fields)


class Mirror:
    """What a subscriber knows: stores minus removals, by hash."""

    def __init__(self) -> None:
        self.copies = Counter[int]()

    def apply(self, events: list[KVEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                assert len(event.token_ids) == len(event.hashes) * event.block_size_tokens
                self.copies.update(event.hashes)
            elif isinstance(event, BlockRemoved):
                self.copies[event.hash] -= 1
                assert self.copies[event.hash] >= 0
            else:
                self.copies.clear()

    def hashes(self) -> frozenset[int]:
        return frozenset(+self.copies)


def drain(engine: Engine, now_s: float = 0.0, limit: int = 5000) -> list[tuple[float, str]]:
    """Run until idle; (time, request) of each last token."""
    finished: list[tuple[float, str]] = []
    for _ in range(limit):
        result = engine.step(now_s)
        if result is None:
            return finished
        now_s = result.end_s
        finished += [(now_s, name) for name in result.finished]
    raise AssertionError("the engine does not come to rest")


requests = st.lists(
    st.tuples(
        st.integers(0, 3),  # which shared prefix
        st.integers(0, 24),  # how much of it
        st.integers(1, 10),  # tokens of its own
        st.integers(1, 12),  # tokens to generate
        st.integers(0, 2),  # priority
        st.sampled_from(["", "tenant"]),
    ),
    min_size=1,
    max_size=14,
)


def made(specs: list[tuple[int, int, int, int, int, str]]) -> list[EngineRequest]:
    return [
        EngineRequest(
            id=f"r{number}",
            prompt_ids=[100 + group] * shared + [number] * own,
            max_tokens=tokens,
            priority=priority,
            salt=salt,
        )
        for number, (group, shared, own, tokens, priority, salt) in enumerate(specs)
    ]


@settings(max_examples=200, deadline=None)
@given(requests, st.sampled_from(list(SchedulingPolicy)), st.integers(0, 10_000))
def test_any_traffic_finishes_and_events_tell_the_truth(
    specs: list[tuple[int, int, int, int, int, str]],
    policy: SchedulingPolicy,
    seed: int,
) -> None:
    random = Random(seed)
    engine, mirror = Engine(replace(SMALL, policy=policy)), Mirror()
    pending, emitted, finished, aborted = made(specs), Counter[str](), set[str](), set[str]()
    wanted = {one.id: one.max_tokens for one in pending}
    now_s = 0.0
    for _ in range(4000):
        while pending and random.random() < 0.5:
            engine.add(pending.pop(0), now_s)
        if random.random() < 0.05:
            name = random.choice(sorted(wanted))
            if name not in finished and name not in {one.id for one in pending}:
                engine.abort(name)
                aborted.add(name)
        result = engine.step(now_s)
        if result is None:
            if not pending:
                break
            continue
        assert result.end_s > now_s
        now_s = result.end_s
        emitted.update(result.emitted)
        finished.update(result.finished)
        mirror.apply(result.events)
        assert mirror.hashes() == engine.cached_hashes
        assert 0 <= engine.used_blocks <= SMALL.blocks
        assert engine.running <= SMALL.max_num_seqs
    assert finished | aborted == set(wanted)
    assert all(emitted[name] == wanted[name] for name in finished - aborted)
    assert (engine.running, engine.waiting, engine.used_blocks) == (0, 0, 0)
    assert engine.queued_uncached_tokens() == 0


@settings(max_examples=200, deadline=None)
@given(requests)
def test_hits_equal_a_naive_prefix_search(
    specs: list[tuple[int, int, int, int, int, str]],
) -> None:
    engine = Engine(replace(SMALL, blocks=4000))
    seen: list[tuple[str, list[int]]] = []
    for one in made(specs):
        prompt = list(one.prompt_ids)
        best = max((_common(prompt, known) for salt, known in seen if salt == one.salt), default=0)
        expected = min(best, len(prompt) - 1) // 4 * 4
        assert engine.cached_tokens(prompt, one.salt) == expected
        engine.add(one, 0.0)
        result = engine.step(0.0)
        assert result is not None
        while one.id not in result.first:
            result = engine.step(result.end_s)
            assert result is not None
        assert result.first[one.id].cached_tokens == expected
        drain(engine)
        reply = reply_tokens(prompt, one.max_tokens, Vocabulary.numbers())
        # The KV of the last token is never computed.
        computed = [*prompt, *reply][: len(prompt) + one.max_tokens - 1]
        seen.append((one.salt, computed[: len(computed) // 4 * 4]))


def _common(one: list[int], other: list[int]) -> int:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


@settings(max_examples=200, deadline=None)
@given(requests, st.lists(st.floats(0.01, 3.0), min_size=14, max_size=14))
def test_runs_of_rounds_change_nothing(
    specs: list[tuple[int, int, int, int, int, str]], gaps: list[float]
) -> None:
    single = _replay(specs, gaps, together=False)
    together = _replay(specs, gaps, together=True)
    assert [name for name, *_ in single] == [name for name, *_ in together]
    for one, other in zip(single, together, strict=True):
        assert one[1:] == pytest.approx(other[1:])


def _replay(
    specs: list[tuple[int, int, int, int, int, str]], gaps: list[float], *, together: bool
) -> list[tuple[str, float, float]]:
    engine, now_s, arrivals, at_s = Engine(SMALL), 0.0, [], 0.0
    for one, gap in zip(made(specs), gaps, strict=False):
        at_s += gap
        arrivals.append((at_s, one))
    first: dict[str, float] = {}
    emitted = Counter[str]()
    last: list[tuple[str, float, float]] = []
    while len(last) < len(specs):
        while arrivals and arrivals[0][0] <= now_s + 1e-9:
            engine.add(arrivals.pop(0)[1], now_s)
        upcoming = arrivals[0][0] - 1e-9 if arrivals else inf
        result = engine.step(now_s, upcoming if together else None)
        if result is None:
            now_s = arrivals[0][0]
            continue
        now_s = result.end_s
        first.update(dict.fromkeys(result.first, now_s))
        emitted.update(result.emitted)
        last += [(name, first[name], now_s) for name in result.finished]
    assert emitted == {one.id: one.max_tokens for one in made(specs)}
    return last


def test_a_full_hit_recomputes_the_last_block() -> None:
    engine = Engine(replace(SMALL, block_size_tokens=32, blocks=64, max_batched_tokens=2048))
    prompt = list(range(512))
    engine.add(request("cold", prompt), 0.0)
    drain(engine)
    assert engine.cached_tokens(prompt) == 480
    assert engine.cached_tokens([*prompt, 7]) == 512
    assert engine.cached_tokens(prompt, salt="other") == 0
    assert engine.cached_tokens(prompt, adapter="other") == 0


def test_prefill_costs_the_same_however_it_is_cut() -> None:
    prompt = list(range(40))
    whole, cut = (Engine(replace(SMALL, max_batched_tokens=budget)) for budget in (64, 8))
    whole.add(request("a", prompt, 1), 0.0)
    cut.add(request("a", prompt, 1), 0.0)
    expected = 0.5 + 0.01 * 40 + 0.001 * 40**2
    assert drain(whole)[-1][0] == pytest.approx(expected)
    assert drain(cut)[-1][0] == pytest.approx(expected)


def test_a_step_pays_for_its_batch() -> None:
    engine = Engine(SMALL)
    for name in "ab":
        engine.add(request(name, [1, 2], 3), 0.0)
    first = engine.step(0.0)
    assert first is not None
    assert set(first.first) == {"a", "b"}
    second = engine.step(first.end_s)
    assert second is not None
    assert second.duration_s == pytest.approx(0.1 + 2 * 0.01)


def test_a_chunk_a_step_and_its_events() -> None:
    engine = Engine(replace(SMALL, blocks=40))
    engine.add(request("a", list(range(40)), 6, salt="t"), 0.0)
    events = []
    now_s = 0.0
    while (result := engine.step(now_s)) is not None:
        now_s = result.end_s
        events.append([event for event in result.events if isinstance(event, BlocksStored)])
    stored = [event for step in events for event in step]
    assert [len(event.hashes) for event in stored] == [4, 4, 2, 1]
    assert stored[0].parent is None
    assert [event.parent for event in stored[1:]] == [e.hashes[-1] for e in stored[:-1]]
    reply = reply_tokens(list(range(40)), 6, Vocabulary.numbers())
    assert list(stored[-1].token_ids) == reply[:4]
    assert stored[0].salt == "t"


@pytest.mark.parametrize("until_s", [None, inf])
def test_short_of_blocks_the_last_admitted_starts_over(until_s: float | None) -> None:
    engine = Engine(replace(SMALL, blocks=6))
    engine.add(request("old", [1] * 8, 16), 0.0)
    engine.add(request("new", [2] * 8, 16), 0.0)
    preempted: list[str] = []
    finished: list[str] = []
    emitted = Counter[str]()
    now_s = 0.0
    while (result := engine.step(now_s, until_s)) is not None:
        now_s = result.end_s
        preempted += result.preempted
        finished += result.finished
        emitted.update(result.emitted)
    assert set(preempted) == {"new"}
    assert finished == ["old", "new"]
    assert emitted == {"old": 16, "new": 16}
    assert engine.stats.preemptions_total == len(preempted)


def test_a_step_that_preempts_admits_nobody() -> None:
    engine = Engine(replace(SMALL, blocks=6, policy=SchedulingPolicy.PRIORITY))
    engine.add(request("old", [1] * 8, 16, priority=0), 0.0)
    engine.add(request("new", [2] * 8, 16, priority=5), 0.0)
    result = engine.step(0.0)
    assert result is not None
    result = engine.step(result.end_s)
    assert result is not None
    assert engine.kv_usage == 1.0
    engine.add(request("urgent", [3], 1, priority=-1), result.end_s)
    while not result.preempted:
        result = engine.step(result.end_s)
        assert result is not None
        assert not result.first
    following = engine.step(result.end_s)
    assert following is not None
    assert set(following.first) == {"urgent"}


def test_a_place_freed_in_a_step_serves_the_next() -> None:
    engine = Engine(replace(SMALL, max_num_seqs=1))
    engine.add(request("a", [1, 2, 3], 1), 0.0)
    engine.add(request("b", [4, 5, 6], 1), 0.0)
    prefill_s = 0.5 + 0.01 * 3 + 0.001 * 3**2
    assert drain(engine) == [
        (pytest.approx(prefill_s), "a"),
        (pytest.approx(2 * prefill_s), "b"),
    ]


def blocked_engine() -> Engine:
    """One request runs, and the next is too large to join it."""
    engine = Engine(replace(SMALL, policy=SchedulingPolicy.PRIORITY))
    engine.add(request("runs", [1] * 20, 20), 0.0)
    engine.add(request("large", [2] * 40, 2), 0.0)
    for now_s in range(3):
        engine.step(float(now_s))
    assert (engine.running, engine.waiting) == (1, 1)
    return engine


def test_who_is_more_urgent_than_a_blocked_head_joins() -> None:
    engine = blocked_engine()
    engine.add(request("urgent", [3], 1, priority=-1), 3.0)
    result = engine.step(3.0)
    assert result is not None
    assert set(result.first) == {"urgent"}


def test_when_a_blocked_head_leaves_the_next_joins() -> None:
    engine = blocked_engine()
    engine.add(request("small", [3], 1), 3.0)
    result = engine.step(3.0)
    assert result is not None
    assert not result.first
    engine.abort("large")
    result = engine.step(4.0)
    assert result is not None
    assert set(result.first) == {"small"}


def test_blocks_are_taken_when_a_token_needs_them() -> None:
    engine = Engine(SMALL)
    engine.add(request("a", [1] * 6, 14), 0.0)
    tokens, now_s = 5, 0.0
    while (result := engine.step(now_s)) is not None:
        now_s = result.end_s
        tokens += 1
        assert engine.used_blocks == (0 if result.finished else -(-tokens // 4))
    assert tokens == 6 + 13


def test_priority_orders_the_queue_only_under_its_policy() -> None:
    order = {}
    for policy in SchedulingPolicy:
        engine = Engine(replace(SMALL, max_num_seqs=1, policy=policy))
        for name, priority in (("first", 5), ("late", 5), ("urgent", -1)):
            engine.add(request(name, [1, 2, 3], 1, priority=priority), 0.0)
        order[policy] = [name for _, name in drain(engine)]
    assert order[SchedulingPolicy.FCFS] == ["first", "late", "urgent"]
    assert order[SchedulingPolicy.PRIORITY] == ["urgent", "first", "late"]


def test_abort_frees_everything_at_once() -> None:
    engine = Engine(SMALL)
    engine.add(request("runs", [1] * 20, 9), 0.0)
    engine.add(request("waits", [2] * 20, 9), 0.0)
    engine.step(0.0)
    engine.abort("runs")
    engine.abort("waits")
    engine.abort("unknown")
    assert (engine.running, engine.waiting, engine.used_blocks) == (0, 0, 0)
    assert engine.step(1.0) is None


def test_reset_is_told_with_the_next_step() -> None:
    engine = Engine(SMALL)
    engine.add(request("a", [1] * 8, 1), 0.0)
    drain(engine)
    assert engine.reset_prefix_cache()
    assert engine.cached_tokens([1] * 9) == 0
    assert engine.step(1.0) is None
    engine.add(request("b", [1] * 8, 1), 1.0)
    result = engine.step(1.0)
    assert result is not None
    assert [type(event) for event in result.events] == [BlocksCleared, BlocksStored]


def test_reset_is_refused_while_a_request_holds_blocks() -> None:
    engine = Engine(SMALL)
    engine.add(request("a", [1] * 8, 5), 0.0)
    engine.step(0.0)
    assert not engine.reset_prefix_cache()
    assert engine.cached_tokens([1] * 9) == 8


def test_what_cannot_fit_is_refused_at_once() -> None:
    engine = Engine(SMALL)
    with pytest.raises(RequestTooLong):
        engine.add(request("a", [1] * 46, 3), 0.0)
    engine.add(request("b", [1] * 45, 3), 0.0)
    with pytest.raises(DuplicateRequest):
        engine.add(request("b", [1], 1), 0.0)
    with pytest.raises(EngineError):
        engine.add(request("c", [], 1), 0.0)
    with pytest.raises(EngineError):
        replace(SMALL, max_batched_tokens=2)
    assert [name for _, name in drain(engine)] == ["b"]


def test_queued_uncached_tokens_counts_what_is_left_to_compute() -> None:
    engine = Engine(SMALL)
    engine.add(request("warm", [1] * 8, 1), 0.0)
    drain(engine)
    engine.add(request("a", [1] * 8 + [2] * 12, 2), 0.0)
    assert engine.queued_uncached_tokens() == 12
    engine.add(request("b", [3] * 20, 2), 0.0)
    assert engine.queued_uncached_tokens() == 32
    engine.step(0.0)
    assert engine.queued_uncached_tokens() == 32 - SMALL.max_batched_tokens
