"""Multi-turn chat: many conversations, a few shared system prompts, no session id anywhere.

Sessions start as a Poisson process, given their number: independent uniform start times, sorted.
A session picks its system prompt by Zipf popularity, then takes its turns. Each turn carries the
whole conversation so far, the model's real replies included, so a turn cannot be sent before the
previous reply is complete: it is due one exponential think time after that. This is as open a loop
as a conversation allows. Starts do not wait for the system under test; later turns of a slow system
move back with its replies, which makes a slow system look better than it would to users who type on
regardless, never worse.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from random import Random

from loadgen.errors import WorkloadError
from loadgen.workload.model import Session, Turn, Workload
from loadgen.workload.text import prose


@dataclass(frozen=True, slots=True)
class MultiturnSettings:
    """Sizes in characters, times in seconds. Ranges are inclusive and drawn uniformly."""

    sessions: int = 52
    arrival_window_s: float = 10.0
    turns: tuple[int, int] = (5, 7)
    think_mean_s: float = 1.0
    system_prompts: int = 10
    system_zipf: float = 1.0
    system_chars: int = 4096
    user_chars: tuple[int, int] = (300, 1100)
    reply_tokens: tuple[int, int] = (24, 48)

    def __post_init__(self) -> None:
        if min(self.sessions, self.turns[0], self.system_prompts) < 1:
            raise WorkloadError("sessions, turns and system_prompts must be at least 1")
        if self.arrival_window_s < 0 or self.think_mean_s < 0 or self.system_zipf < 0:
            raise WorkloadError("times and the Zipf exponent cannot be negative")
        for low, high in (self.turns, self.user_chars, self.reply_tokens):
            if not 1 <= low <= high:
                raise WorkloadError(f"a range must be 1 <= low <= high, got ({low}, {high})")


def multiturn(settings: MultiturnSettings, seed: int) -> Workload:
    """The sessions of one run; equal settings and seed give equal text and times."""
    rng = Random(f"multiturn:{seed}")
    prompts = [prose(rng, settings.system_chars) for _ in range(settings.system_prompts)]
    popularity = list(
        accumulate(1 / rank**settings.system_zipf for rank in range(1, len(prompts) + 1))
    )
    starts = sorted(rng.uniform(0, settings.arrival_window_s) for _ in range(settings.sessions))
    return Workload(
        "multiturn",
        tuple(
            Session(
                start_s=start_s,
                turns=_turns(settings, rng),
                system=rng.choices(prompts, cum_weights=popularity)[0],
            )
            for start_s in starts
        ),
    )


def _turns(settings: MultiturnSettings, rng: Random) -> tuple[Turn, ...]:
    return tuple(
        Turn(
            text=prose(rng, rng.randint(*settings.user_chars)),
            max_tokens=rng.randint(*settings.reply_tokens),
            think_s=rng.expovariate(1 / settings.think_mean_s)
            if index and settings.think_mean_s
            else 0.0,
        )
        for index in range(rng.randint(*settings.turns))
    )
