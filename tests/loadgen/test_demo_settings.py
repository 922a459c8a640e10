import pytest

from loadgen.demo.experiment import make_workload, prepare
from loadgen.demo.settings import (
    CACHE_SHARE,
    DemoSettings,
    engine_model,
    mooncake_settings,
    multiturn_settings,
    parse_policies,
)
from loadgen.errors import TraceError, WorkloadError
from loadgen.tokenizer import default_folder
from loadgen.workload import TraceRow
from tests.loadgen.demo_plans import chat_plan


def test_each_cache_holds_a_quarter_of_the_working_set():
    prepared = prepare(DemoSettings())
    assert prepared.model.blocks == round(CACHE_SHARE * prepared.plan.distinct_blocks)
    assert prepared.working_set_over_cache == pytest.approx(1 / CACHE_SHARE, rel=0.01)
    assert 250 <= prepared.workload.requests <= 330


def test_a_tiny_run_has_room_for_its_largest_request():
    plan = chat_plan(sessions=1)
    model = engine_model(plan, DemoSettings())
    assert model.blocks >= 4 * plan.largest_request_blocks
    assert model.blocks > CACHE_SHARE * plan.distinct_blocks


def test_load_per_replica_stays_the_same():
    four, eight = (multiturn_settings(DemoSettings(replicas=count)) for count in (4, 8))
    assert eight.sessions == pytest.approx(2 * four.sessions, abs=1)
    assert eight.arrival_window_s == four.arrival_window_s
    short, long = (multiturn_settings(DemoSettings(duration_s=seconds)) for seconds in (10, 40))
    assert long.sessions / long.arrival_window_s == pytest.approx(
        short.sessions / short.arrival_window_s
    )


def test_a_trace_is_fitted_into_the_time_of_the_demo():
    rows = [TraceRow(1000, 600, 9, [0, 1]), TraceRow(61_000, 512, 9, [2])]
    settings = mooncake_settings(rows, DemoSettings(duration_s=15.0))
    assert settings.time_scale == pytest.approx(0.25)
    assert mooncake_settings(rows[:1], DemoSettings()).time_scale == 1.0


def test_traffic_comes_from_the_trace_when_there_is_one(tmp_path):
    path = tmp_path / "trace.jsonl"
    row = '{"timestamp": %d, "input_length": 900, "output_length": 32, "hash_ids": [0, %d]}\n'
    path.write_text("".join(row % (i * 100, i + 1) for i in range(5)))
    settings = DemoSettings(duration_s=2.0, trace=path, requests=4)
    prepared = prepare(settings)
    assert prepared.workload.requests == prepared.bound.requests == 4
    assert prepared.workload.sessions[-1].start_s == pytest.approx(2.0)
    assert prepared.plan.prompt_tokens == 4 * (32 + 25)
    path.write_text("{}\n")
    with pytest.raises(TraceError):
        make_workload(settings, default_folder())


def test_policies_are_named_once_and_in_order():
    assert parse_policies("cost, round_robin,cost") == ("cost", "round_robin")
    with pytest.raises(WorkloadError):
        parse_policies(" ,")
    with pytest.raises(WorkloadError, match=r"no policy 'best'; there are .*round_robin"):
        parse_policies("cost,best")
