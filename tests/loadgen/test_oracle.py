from itertools import count

import pytest

from loadgen.demo.oracle import Fixed, Greedy, KeepSessions, mean_ttft_s, oracle, schedule_of
from loadgen.demo.plan import Plan, PlannedSession, PlannedTurn
from loadgen.demo.virtual import play
from loadgen.replica.model import EngineModel
from tests.loadgen.demo_plans import chat_plan, engine


def turn(prompt_tokens, reply_tokens=2, first_token=0, think_s=0.0) -> PlannedTurn:
    prompt = range(first_token, first_token + prompt_tokens)
    hashes = [first_token * 1000 + block for block in range(prompt_tokens // 16)]
    return PlannedTurn(list(prompt), list(range(reply_tokens)), hashes, think_s)


SLOW = EngineModel(
    blocks=1000,
    prefill_c_s=0.5,
    prefill_a_s=0.01,
    prefill_b_s=0.0,
    decode_step_s=1.0,
    decode_per_request_s=0.25,
)


def round_robin():
    turns = count()
    return lambda session, turn, fleet, now_s: next(turns) % len(fleet)


def test_one_request_takes_its_prefill_and_then_a_decode_round_per_token():
    plan = Plan((PlannedSession(2.0, (turn(100, reply_tokens=3),)),))
    [outcome] = play(plan, SLOW, 1, round_robin())
    assert outcome.due_s == outcome.sent_s == 2.0
    assert outcome.ttft_s == pytest.approx(0.5 + 100 * 0.01)
    assert outcome.done_s == pytest.approx(2.0 + 1.5 + 2 * 1.25)
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens) == (100, 0, 3)


def test_a_next_turn_is_due_a_think_time_after_the_reply_and_finds_its_prefix():
    first, second = turn(160), turn(160, think_s=5.0)
    [one, other] = play(Plan((PlannedSession(0.0, (first, second)),)), SLOW, 1, round_robin())
    assert other.due_s == pytest.approx(one.done_s + 5.0)
    # All blocks but the last: one token at least is computed.
    assert other.cached_tokens == 144
    assert other.ttft_s == pytest.approx(0.5 + 16 * 0.01)


def test_requests_of_one_moment_share_a_step():
    plan = Plan(tuple(PlannedSession(1.0, (turn(50, first_token=1000 * i),)) for i in range(3)))
    outcomes = play(plan, SLOW, 1, round_robin())
    # The step takes 3 x (0.5 + 50 x 0.01) seconds, for all of them.
    assert [outcome.first_token_s for outcome in outcomes] == pytest.approx([4.0] * 3)


def test_the_prediction_is_what_then_happens():
    """On an idle replica and behind a queue that fits in one step, greedy's figure is exact."""
    predicted = []

    def place(session, turn, fleet, now_s):
        predicted.append(now_s + fleet[0].first_token_s(turn, now_s))
        return 0

    sessions = [PlannedSession(0.0, (turn(64, 1),)), PlannedSession(0.2, (turn(80, 1, 5000),))]
    outcomes = play(Plan(tuple(sessions)), SLOW, 1, place)
    assert predicted == [pytest.approx(outcome.first_token_s) for outcome in outcomes]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_oracle_is_not_beaten_by_any_rule_and_beats_round_robin(seed):
    plan = chat_plan(seed=seed)
    model = engine(plan)
    bound = oracle(plan, model, 4, seed=seed, moves=10)
    assert len(bound) == len(plan.turns)
    assert all(outcome.error is None and outcome.done_s is not None for outcome in bound)
    for rule in (Greedy(0.0), Greedy(0.02), KeepSessions(0.03), round_robin()):
        assert mean_ttft_s(bound) <= mean_ttft_s(play(plan, model, 4, rule))
    assert mean_ttft_s(bound) < 0.8 * mean_ttft_s(play(plan, model, 4, round_robin()))


def test_the_oracle_is_a_schedule_that_can_be_played_again():
    plan = chat_plan()
    model = engine(plan)
    bound = oracle(plan, model, 4, seed=1, moves=5)
    assert bound == oracle(plan, model, 4, seed=1, moves=5)
    assert play(plan, model, 4, Fixed(schedule_of(bound))) == bound


def test_more_hindsight_is_never_worse():
    plan = chat_plan(seed=4)
    model = engine(plan)
    means = [mean_ttft_s(oracle(plan, model, 4, seed=4, moves=moves)) for moves in (0, 10, 30)]
    assert means == sorted(means, reverse=True)


def test_one_replica_leaves_no_choice():
    plan = chat_plan()
    model = engine(plan, share=1.0)
    outcomes = oracle(plan, model, 1, seed=1)
    assert outcomes == play(plan, model, 1, round_robin())


def test_an_endless_cache_reuses_every_block_seen_before():
    plan = chat_plan()
    outcomes = play(plan, engine(plan, share=2.0), 1, round_robin())
    seen: set[int] = set()
    reusable = 0
    for outcome in sorted(outcomes, key=lambda one: one.first_token_s):
        planned = plan.sessions[outcome.session].turns[outcome.turn]
        blocks = planned.hashes[: (len(planned.prompt_ids) - 1) // 16]
        reusable += sum(block in seen for block in blocks) * 16
        seen.update(planned.hashes)
    cached = sum(outcome.cached_tokens for outcome in outcomes)
    assert cached == pytest.approx(reusable, rel=0.02)
