"""Requests whose times are measured: cold, warm, partly cached, and decoding in batches.

Every prompt begins with words of its own, so that nothing that anybody asked before can be in the
cache, and a run counts as cold only if the replica itself says that it cached nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from statistics import median
from time import monotonic
from typing import Protocol

from loadgen.calibrate.fit import Decode, Prefill
from loadgen.errors import CalibrationError
from loadgen.outcome import Outcome
from loadgen.workload.model import Chat, Completion
from loadgen.workload.text import prose

_PROBE_CHARS = 600
_DECODE_TOKENS = 24
_DECODE_CHARS = 120
_BATCHES = (1, 2, 4)
_WARM_RUNS = 3
# What is kept free of a model's context, and the smallest prompt that is worth measuring.
_MARGIN_TOKENS = 64
_SMALLEST_TOKENS = 96
_SHARES = (0.06, 0.25, 0.5, 0.75, 1.0)


class Sender(Protocol):
    """What `loadgen.client.Client` is to a probe."""

    async def send(self, request: Chat | Completion, outcome: Outcome) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. `longest_tokens` bounds prompts, `budget_s` the whole."""

    longest_tokens: int
    budget_s: float
    cold_runs: int = 3


@dataclass(slots=True)
class Measured:
    """All points; `cut_short` names what the budget left out."""

    prefills: list[Prefill] = field(default_factory=list)
    decodes: list[Decode] = field(default_factory=list)
    cut_short: list[str] = field(default_factory=list)


class Probes:
    """Measures one replica. `seed` must differ from run to run, or prompts are in the cache."""

    def __init__(
        self,
        sender: Sender,
        plan: Plan,
        seed: int,
        *,
        clock: Callable[[], float] = monotonic,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._sender = sender
        self._plan = plan
        self._random = Random(seed)
        self._clock = clock
        self._progress = progress
        self._until_s = clock() + plan.budget_s
        self._chars_per_token = 4.0

    async def measure(self) -> Measured:
        """All points. Raises CalibrationError for a replica that cannot be measured."""
        measured = Measured()
        self._progress("warming up")
        longest_tokens = await self._warm_up()
        for share in _SHARES:
            tokens = max(_SMALLEST_TOKENS, int(longest_tokens * share))
            await self._sizes(tokens, measured)
        for batch in _BATCHES:
            if self._spent(f"batches of {batch}", measured):
                continue
            self._progress(f"decoding {batch} at once")
            measured.decodes.append(Decode(batch, await self._gap_s(batch)))
        return measured

    async def _warm_up(self) -> int:
        """The longest prompt to measure; also learns how long tokens are."""
        prompt = self._prompt(_PROBE_CHARS)
        first = await self._cold(prompt)
        self._chars_per_token = _PROBE_CHARS / first.prompt_tokens
        again = await self._ask(prompt)
        if not again.cached_tokens:
            raise CalibrationError(
                "a repeated prompt was not cached, or the replica does not say so: start vLLM with "
                "--enable-prefix-caching and --enable-prompt-tokens-details"
            )
        # A run of all sizes takes about as long as four of the longest prompt.
        per_token_s = _ttft_s(await self._cold(self._prompt(_PROBE_CHARS))) / first.prompt_tokens
        affordable = int(0.8 * self._plan.budget_s / (4 * self._plan.cold_runs) / per_token_s)
        return max(
            4 * _SMALLEST_TOKENS, min(self._plan.longest_tokens - _MARGIN_TOKENS, affordable)
        )

    async def _sizes(self, tokens: int, measured: Measured) -> None:
        """Cold, warm, and half of it new, around one size."""
        if self._spent(f"prompts of {tokens} tokens", measured):
            return
        self._progress(f"prompts of {tokens} tokens")
        chars = int(tokens * self._chars_per_token)
        cold, warm, partial = [], [], []
        for _ in range(self._plan.cold_runs):
            prompt = self._prompt(chars)
            cold.append(await self._cold(prompt))
            warm += [await self._ask(prompt) for _ in range(_WARM_RUNS)]
            partial.append(await self._ask(prompt[: chars // 2] + self._prompt(chars // 4)))
        for outcomes in (cold, warm, partial):
            measured.prefills.append(_point(outcomes))

    async def _gap_s(self, batch: int) -> float:
        """The median time between tokens while `batch` requests decode."""
        requests = [
            Completion(self._prompt(_DECODE_CHARS), _DECODE_TOKENS + 4 * batch)
            for _ in range(batch)
        ]
        outcomes = await asyncio.gather(*(self._send(request) for request in requests))
        # Until the last has begun, others decode beside a prefill.
        begun_s = max(outcome.first_token_s or 0.0 for outcome in outcomes)
        gaps_s = [gap for outcome in outcomes for gap in _gaps_after(outcome, begun_s)]
        if not gaps_s:
            raise CalibrationError("replies are too short to measure decoding")
        return median(gaps_s)

    async def _cold(self, prompt: str) -> Outcome:
        outcome = await self._ask(prompt)
        if outcome.cached_tokens:
            raise CalibrationError(
                f"a prompt that nobody sent before had {outcome.cached_tokens} cached tokens; "
                "that is no cold run"
            )
        return outcome

    async def _ask(self, prompt: str) -> Outcome:
        return await self._send(Completion(prompt, 1))

    async def _send(self, request: Completion) -> Outcome:
        outcome = await self._sender.send(request, Outcome(0, 0, self._clock()))
        if outcome.error is not None:
            raise CalibrationError(f"a request failed: {outcome.error} {outcome.detail}".rstrip())
        if not outcome.prompt_tokens:
            raise CalibrationError("the replica does not report its usage in streams")
        return outcome

    def _prompt(self, chars: int) -> str:
        mark = f"{self._random.getrandbits(64):016x} "
        return mark + prose(self._random, max(1, chars - len(mark)))

    def _spent(self, what: str, measured: Measured) -> bool:
        spent = self._clock() > self._until_s
        if spent:
            measured.cut_short.append(what)
        return spent


def _point(outcomes: list[Outcome]) -> Prefill:
    """The fastest run of one kind: what else the machine does can only slow it down."""
    best = min(outcomes, key=_ttft_s)
    new_tokens = best.prompt_tokens - best.cached_tokens
    return Prefill(new_tokens, best.cached_tokens, _ttft_s(best))


def _ttft_s(outcome: Outcome) -> float:
    assert outcome.ttft_s is not None
    return outcome.ttft_s


def _gaps_after(outcome: Outcome, begun_s: float) -> list[float]:
    at_s = outcome.first_token_s or 0.0
    kept = []
    for gap_s in outcome.gaps_s:
        if at_s >= begun_s:
            kept.append(gap_s)
        at_s += gap_s
    return kept
