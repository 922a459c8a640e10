"""What the demo runs, and how large and fast the simulated fleet is for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.demo.plan import Plan
from loadgen.errors import WorkloadError
from loadgen.replica.model import EngineModel
from loadgen.workload import MooncakeSettings, MultiturnSettings, TraceRow
from router.policy import POLICIES as KNOWN_POLICIES

BASELINE = "round_robin"
POLICIES = (BASELINE, "least_load", "cost")
MODEL_NAME = "sim-model"
BLOCK_TOKENS = 16

# Each replica holds this share of the distinct blocks of the workload, so that four replicas hold
# the working set only if they do not all hold the same.
CACHE_SHARE = 0.24
# The largest request must fit beside others, also in a tiny run.
MIN_CACHE_REQUESTS = 4

# Of a session: 2.7 a second start during the first 40 % of the run; a turn is thought about for
# 3 % of it. That fills `duration_s` seconds on a fleet that keeps up, and with PREFILL_TOKENS_PER_S
# it keeps a round robin over four replicas busy computing for most of that time.
SESSIONS_PER_S_OF_RUN = 2.7
ARRIVAL_SHARE = 0.4
THINK_SHARE = 0.03
PREFILL_TOKENS_PER_S = 4500.0
# Long enough that conversations, not the shared system prompts, make up most of the working set.
USER_CHARS = (500, 1500)
# A trace comes with its own lengths: the prefill rate is such that computing every prompt in full
# would keep all replicas busy for this share of the time.
TRACE_UTILISATION = 0.75
TRACE_BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """`duration_s` is the length of the traffic of one policy, about; `requests` are of a trace."""

    seed: int = 1
    replicas: int = 4
    duration_s: float = 18.0
    policies: tuple[str, ...] = POLICIES
    trace: Path | None = None
    requests: int = 300

    @property
    def deadline_s(self) -> float:
        """For the traffic of one policy: several times what a loaded fleet needs."""
        return 60.0 + 5 * self.duration_s


def multiturn_settings(settings: DemoSettings) -> MultiturnSettings:
    """Load per replica does not depend on how many replicas there are."""
    fleet = settings.replicas / 4
    return MultiturnSettings(
        sessions=max(1, round(SESSIONS_PER_S_OF_RUN * settings.duration_s * fleet)),
        arrival_window_s=ARRIVAL_SHARE * settings.duration_s,
        turns=(5, 6),
        think_mean_s=THINK_SHARE * settings.duration_s,
        user_chars=USER_CHARS,
    )


def mooncake_settings(rows: Sequence[TraceRow], settings: DemoSettings) -> MooncakeSettings:
    """A sixteenth of the trace's lengths, in the time of the demo."""
    times_ms = [row.timestamp for row in rows]
    span_s = (max(times_ms) - min(times_ms)) / 1000
    return MooncakeSettings(
        requests=settings.requests,
        block_tokens=TRACE_BLOCK_TOKENS,
        time_scale=settings.duration_s / span_s if span_s > 0 else 1.0,
        output_scale=1 / 16,
    )


def engine_model(plan: Plan, settings: DemoSettings) -> EngineModel:
    """The simulated engine that this plan is to be run on."""
    rate = PREFILL_TOKENS_PER_S
    if settings.trace is not None:
        capacity = settings.replicas * settings.duration_s * TRACE_UTILISATION
        rate = max(1.0, plan.prompt_tokens / capacity)
    return EngineModel(
        block_size_tokens=BLOCK_TOKENS,
        blocks=max(
            round(CACHE_SHARE * plan.distinct_blocks),
            MIN_CACHE_REQUESTS * (plan.largest_request_blocks + 1),
        ),
        prefill_c_s=0.004,
        prefill_a_s=1 / rate,
        decode_step_s=0.012,
        decode_per_request_s=0.0003,
    )


def parse_policies(text: str) -> tuple[str, ...]:
    """Names separated by commas, each once. Raises WorkloadError for none or an unknown one."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise WorkloadError("name at least one policy")
    if unknown := [name for name in names if name not in KNOWN_POLICIES]:
        raise WorkloadError(f"no policy {unknown[0]!r}; there are {', '.join(KNOWN_POLICIES)}")
    return names
