"""The index before the judge: random histories in which it must never claim too much.

KVROUTE_TEST_JUDGED is the number of histories of the pure part; the others are a fixed share of it.
A failing history is shrunk, and printed so that it can be put here as a test of its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

from .gateways import RedisListener
from .judge.histories import Features, history, shrunk
from .judge.stage import History, Listener, Misjudged
from .judge.world import World
from .listener import PureListener

HISTORIES = int(os.environ.get("KVROUTE_TEST_JUDGED", "1500"))
FIRST = int(os.environ.get("KVROUTE_TEST_JUDGED_FROM", "0"))
pytestmark = pytest.mark.slow
# "late": the subscriber asks its monitor before it takes a message, so no notice comes late. What
# really comes over sockets, late or not, is judged in test_judged_sockets.py.
OFF = Features({"late"})


def convicted(story: History, listener: Listener) -> str:
    """Why the judge convicts; empty if it does not."""
    try:
        World(story, listener).run()
    except Misjudged as reason:
        return str(reason)
    return ""


def pure(story: History) -> str:
    return convicted(story, PureListener(len(story.configs)))


def report(seed: int, story: History, judge: Callable[[History], str]) -> str:
    small = shrunk(story, lambda candidate: bool(judge(candidate)))
    return f"seed {seed}: {judge(small)}\n{small!r}"


@pytest.mark.parametrize("part", range(10))
def test_it_never_claims_more_than_was_held_within_the_lease(part: int) -> None:
    for seed in range(FIRST + part, FIRST + HISTORIES, 10):
        story = history(seed, OFF)
        assert not pure(story), report(seed, story, pure)


# --- with Redis, two gateways, and crashes


def with_redis(
    runner: asyncio.Runner, url: str, story: History, crash_at: int, answered: bool
) -> tuple[str, int]:
    listener = RedisListener(runner, url, len(story.configs), crash_at, answered)
    try:
        return convicted(story, listener), listener.commands
    finally:
        listener.close()


@pytest.mark.parametrize("seed", range(FIRST, FIRST + max(1, HISTORIES // 50)))
def test_two_gateways_agree_with_the_wire(runner: asyncio.Runner, url: str, seed: int) -> None:
    def judge(story: History) -> str:
        return with_redis(runner, url, story, 0, False)[0]

    story = history(seed, OFF)
    assert not judge(story), report(seed, story, judge)


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("seed", range(FIRST, FIRST + max(1, HISTORIES // 300)))
def test_a_gateway_dies_between_any_two_commands(
    runner: asyncio.Runner, url: str, seed: int, answered: bool
) -> None:
    story = history(seed, OFF)
    _, commands = with_redis(runner, url, story, 0, answered)
    for crash_at in range(1, commands + 1):

        def judge(candidate: History, crash_at: int = crash_at) -> str:
            return with_redis(runner, url, candidate, crash_at, answered)[0]

        assert not judge(story), f"command {crash_at}: " + report(seed, story, judge)
