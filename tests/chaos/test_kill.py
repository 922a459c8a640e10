"""kill -9 of a replica under 200 open requests: who has no byte yet loses nothing."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from tests.chaos.client import Answer, ask, chat_body
from tests.chaos.fleet import ChaosFleet, OneReplica, chaos_fleet

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("KVROUTE_CHAOS_ROUNDS", "2"))
EARLY, LATE, PLAIN = 140, 50, 10
"""Streams that have begun when the replica dies, streams that may not have, and no streams."""
SPEED = ("--prefill-c", "0.01", "--decode-step", "0.06", "--max-num-seqs", "256")
USED_AGAIN_S = 2.0


class Load:
    """Requests under way, each with the answer it is getting."""

    def __init__(self, fleet: ChaosFleet, words: int) -> None:
        self._fleet = fleet
        self._words = words
        self.answers: list[Answer] = []
        self._tasks: list[asyncio.Task[Answer]] = []

    def start(self, count: int, *, stream: bool) -> list[Answer]:
        new = [Answer() for _ in range(count)]
        for number, answer in enumerate(new, len(self.answers)):
            text = " ".join(f"{number} is {word};" for word in range(self._words))
            body = chat_body(text, stream=stream, max_tokens=40, ignore_eos=True)
            self._tasks.append(asyncio.create_task(ask(self._fleet.url, body, answer)))
        self.answers += new
        return new

    async def ended(self) -> None:
        await asyncio.gather(*self._tasks)


async def begun(answers: list[Answer], count: int) -> None:
    """Until `count` of them have received a byte."""
    waiting = {asyncio.create_task(each.begun.wait()) for each in answers}
    done = 0
    try:
        async with asyncio.timeout(20):
            while done < count:
                finished, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                done += len(finished)
    finally:
        for task in waiting:
            task.cancel()


async def test_200_open_requests_survive_a_killed_replica(tmp_path: Path) -> None:
    async with chaos_fleet(3, tmp_path, replica=SPEED) as fleet:
        cuts = sent_again = 0.0
        for number in range(ROUNDS):
            victim = fleet.replicas[number % 3]
            cut, again = await one_round(fleet, victim)
            cuts += cut
            sent_again += again
            back_s = await victim.restart()
            again_s = await used_again(fleet, victim, back_s)
            print(f"round {number}: used again {again_s:.2f} s after its return")
            assert again_s <= USED_AGAIN_S
            await fleet.all_up()
        # A single round may by chance have nobody in one of the two states; not all of them.
        assert cuts, "no replica died while a stream was under way"
        assert sent_again, "no replica died while somebody waited for a first byte"


async def one_round(fleet: ChaosFleet, victim: OneReplica) -> tuple[int, float]:
    """Requests that were cut and that were sent again when the victim died."""
    retries = sum((await fleet.metric("kvroute_retries_total")).values())
    load = Load(fleet, words=20)
    early = load.start(EARLY, stream=True)
    await begun(early, EARLY)
    late = load.start(LATE, stream=True) + load.start(PLAIN, stream=False)
    await begun(late, 10)
    had_bytes = [each for each in load.answers if each.begun.is_set()]
    victim.kill()
    await load.ended()
    verdicts = [verdict(each, victim) for each in load.answers]
    failed = [str(each) for each, said in zip(load.answers, verdicts, strict=True) if not said]
    assert not failed, f"{len(failed)} failed, e.g. {failed[:3]}"
    untouched = [each for each in load.answers if each not in had_bytes]
    again = sum((await fleet.metric("kvroute_retries_total")).values()) - retries
    print(f"{verdicts.count('cut')} cut, {again:.0f} sent again, {len(untouched)} had no byte")
    await fleet.becomes_idle()
    return verdicts.count("cut"), again


def verdict(answer: Answer, victim: OneReplica) -> str:
    """Empty for what must not happen."""
    if answer.complete:
        return "complete"
    return "cut" if answer.cut and answer.replica == victim.name and answer.streaming else ""


async def used_again(fleet: ChaosFleet, replica: OneReplica, back_s: float) -> float:
    """Seconds after its return until it answers a request."""
    number = 0
    while time.monotonic() < back_s + 10:
        number += 1
        body = chat_body(f"{back_s} and {number}", max_tokens=1)
        answers = await asyncio.gather(*(ask(fleet.url, body) for _ in range(3)))
        assert all(each.complete for each in answers), [str(each) for each in answers]
        if any(each.replica == replica.name for each in answers):
            return time.monotonic() - back_s
        await asyncio.sleep(0.02)
    raise AssertionError(f"{replica.name} is not used: {await fleet.ready()}")


async def test_requests_survive_two_replicas_killed_one_after_the_other(tmp_path: Path) -> None:
    """All of them wait for their first byte; many are at both replicas when these die."""
    slow = ("--prefill-c", "0.5", "--decode-step", "0.01", "--max-num-seqs", "256")
    limits = {"policy": "round_robin", "probe_interval_s": 30, "retry_budget": 0}
    async with chaos_fleet(3, tmp_path, replica=slow, **limits) as fleet:
        load = Load(fleet, words=1)
        load.start(30, stream=True)
        first, second, _ = fleet.replicas
        await holds(fleet, first, 10)
        first.kill()
        await holds(fleet, second, 15)
        second.kill()
        await load.ended()
        failed = [str(each) for each in load.answers if not verdict(each, second)]
        assert not failed, f"{len(failed)} failed, e.g. {failed[:3]}"
        retried = sum((await fleet.metric("kvroute_retries_total")).values())
        cut = len([each for each in load.answers if each.cut])
        print(f"{retried:.0f} sent again, {cut} cut")
        assert retried > 30 - cut - 10
        await fleet.becomes_idle()


async def holds(fleet: ChaosFleet, replica: OneReplica, count: int) -> None:
    async def met() -> bool:
        running = await fleet.metric("kvroute_running_requests")
        return sum(n for labels, n in running.items() if replica.name in labels) >= count

    await fleet.until(f"{replica.name} has {count} requests", met)
