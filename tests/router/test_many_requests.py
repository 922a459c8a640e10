"""10,000 made requests: each reaches the replica byte for byte, or is refused as documented."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.router.made import (
    BAD_FRAMINGS,
    CODINGS,
    DAMAGES,
    FRAMINGS,
    TARGETS,
    Case,
    Made,
    make,
)
from tests.router.raw import Answer, Wire
from tests.router.support import (
    Running,
    ScriptedReplica,
    answer_ok,
    running_gateway,
    scripted,
)

EXAMPLES = 100
BATCH = 100
WIRES = 4


def mostly(usual: Sequence[str], others: Sequence[str]) -> st.SearchStrategy[str]:
    """One of `usual` in most cases: a request has one thing wrong with it, if any."""
    return st.sampled_from([*list(usual) * (9 * len(others) // len(usual) or 1), *others])


CASES = st.builds(
    Case,
    seed=st.integers(0, (1 << 32) - 1),
    damage=mostly(["none"], [*DAMAGES] * 3),
    coding=mostly(["", "gzip", "deflate", "identity"], [*CODINGS][4:]),
    framing=mostly(FRAMINGS, BAD_FRAMINGS),
    target=st.sampled_from(TARGETS),
    pieces=st.sampled_from((1, 1, 1, 2, 5)),
)


class Driver:
    """A gateway, its replica, and a few connections that are kept while they last."""

    def __init__(self, running: Running, replica: ScriptedReplica) -> None:
        self.running = running
        self.replica = replica
        self.outcomes: Counter[str] = Counter()
        self._wires: list[Wire | None] = [None] * WIRES
        self._sent = 0

    async def send(self, cases: Sequence[Case]) -> None:
        """All of them, and compare what came of each. Raises AssertionError."""
        self.replica.seen.clear()
        made = [make(case, f"made-{self._sent + n}") for n, case in enumerate(cases)]
        self._sent += len(made)
        answers = await asyncio.gather(*(self._on_wire(at, made[at::WIRES]) for at in range(WIRES)))
        for at, each in enumerate(answers):
            for request, answer in zip(made[at::WIRES], each, strict=True):
                self._judge(request, answer)
        assert self.running.idle()

    async def _on_wire(self, at: int, made: Sequence[Made]) -> list[Answer]:
        answers = []
        for each in made:
            wire = self._wires[at] or await Wire.to(self.running.port)
            self._wires[at] = wire
            size = -(-len(each.request) // each.pieces)
            for start in range(0, len(each.request), size):
                wire.send(each.request[start : start + size])
                await asyncio.sleep(0)
            answer = await wire.answer()
            if answer.status == 100:
                answer = await wire.answer()
            answers.append(answer)
            if answer.closes:
                wire.writer.transport.abort()
                self._wires[at] = None
        return answers

    async def close(self) -> None:
        for wire in self._wires:
            if wire is not None:
                wire.writer.transport.abort()
        await asyncio.sleep(0)

    def _judge(self, made: Made, answer: Answer) -> None:
        arrived = [seen for seen in self.replica.seen if seen.header("x-mine") == made.number]
        if made.error is None:
            assert answer.status == 200, (answer, made.request)
            assert [seen.body for seen in arrived] == [made.body], made.request
            assert arrived[0].header("x-request-id") == made.number
            assert arrived[0].header("content-encoding") is None
            self.outcomes["passed"] += 1
        else:
            assert (answer.status, answer.code) == made.error, (answer, made.request)
            assert arrived == [], made.request
            self.outcomes[answer.code] += 1


@pytest.mark.slow
def test_ten_thousand_made_requests_pass_byte_for_byte_or_are_refused_as_documented(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        async def begin() -> Driver:
            (replica,) = await stack.enter_async_context(scripted(answer_ok))
            running = await stack.enter_async_context(running_gateway(replica, probe_interval_s=1))
            driver = Driver(running, replica)
            stack.push_async_callback(driver.close)
            return driver

        driver = runner.run(begin())

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(CASES, min_size=BATCH, max_size=BATCH))
        def hold(cases: list[Case]) -> None:
            runner.run(driver.send(cases))

        try:
            hold()
        finally:
            runner.run(stack.aclose())
        assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []
        assert driver.outcomes.total() >= EXAMPLES * BATCH
        assert driver.outcomes["passed"] > EXAMPLES * BATCH // 3
        refused = {"invalid_request", "model_not_found", "unsupported_encoding", "bad_http"}
        assert set(driver.outcomes) == {"passed", *refused}
