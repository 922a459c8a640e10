"""The gateway killed, its Valkey killed or stopped: what goes on, what ends, what comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.chaos.client import Answer, ask, chat_body, get_text
from tests.chaos.fleet import ChaosFleet, chaos_fleet
from tests.whole import valkey_children

pytestmark = pytest.mark.slow

FAST = ("--prefill-c", "0.002", "--decode-step", "0.005", "--max-num-seqs", "256")
Condition = Callable[[], Awaitable[bool]]
PROMPT = " ".join(f"number {number} stays;" for number in range(80))


async def test_a_killed_gateway_ends_its_requests_and_the_next_one_serves(tmp_path: Path) -> None:
    slow = ("--decode-step", "0.1", "--max-num-seqs", "256")
    async with chaos_fleet(2, tmp_path, replica=slow) as fleet:
        answers = [Answer() for _ in range(40)]
        bodies = [chat_body(f"{n}", stream=True, max_tokens=500) for n in range(40)]
        pairs = zip(bodies, answers, strict=True)
        tasks = [asyncio.create_task(ask(fleet.url, *pair)) for pair in pairs]
        async with asyncio.timeout(20):
            await asyncio.gather(*(each.begun.wait() for each in answers))
        servers = valkey_children(fleet.pid)
        fleet.process.kill()
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks)
        assert not any(each.whole or b"[DONE]" in each.body for each in answers)

        async def engines_idle() -> bool:
            texts = [await get_text(each.url, "/metrics") for each in fleet.replicas]
            return not any(running_in_engine(text) for text in texts)

        await fleet.restart_gateway()
        await fleet.until("the engines have dropped its requests", engines_idle, 5)
        await fleet.until("the killed gateway's Valkey has ended", gone(servers), 5)
        answer = await ask(fleet.url, chat_body("next", max_tokens=2))
        assert answer.complete
        await fleet.becomes_idle()


def running_in_engine(text: str) -> float:
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    assert lines
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def gone(pids: list[int]) -> Condition:
    def alive(pid: int) -> bool:
        return Path(f"/proc/{pid}").exists()

    async def met() -> bool:
        return not any(alive(pid) for pid in pids)

    return met


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
async def test_without_its_valkey_requests_are_served_as_quickly(
    tmp_path: Path, what: signal.Signals
) -> None:
    async with chaos_fleet(2, tmp_path, replica=FAST) as fleet:
        await fleet.index_current()
        await matched(fleet)
        usual_s = await latency(fleet)
        (server,) = valkey_children(fleet.pid)
        os.kill(server, what)
        first_s = await latency(fleet)  # the gateway may not know yet
        if what == signal.SIGSTOP:
            await fleet.until("the index is unavailable", unavailable(fleet), 15)
            hanging_s = await latency(fleet)
            os.kill(server, signal.SIGCONT)
        else:
            hanging_s = await latency(fleet)
        recovered_s = await fleet.until("the index is back", available(fleet), 20)
        await fleet.index_current()
        await matched(fleet)
        shown = [f"{each * 1e3:.1f}" for each in (usual_s, first_s, hanging_s)]
        print(f"ms: {shown[0]} usual, {shown[1]} at once, {shown[2]} later; {recovered_s:.1f} s")
        assert max(first_s, hanging_s) < usual_s + 0.05
        await fleet.becomes_idle()


async def latency(fleet: ChaosFleet) -> float:
    """The slowest but two of 60 requests, four at a time: a busy machine is not a fault."""
    seconds = []
    for _ in range(15):
        body = chat_body(PROMPT, max_tokens=2)
        answers = await asyncio.gather(*(ask(fleet.url, body) for _ in range(4)))
        assert all(each.complete for each in answers), [str(each) for each in answers]
        seconds += [each.seconds for each in answers]
    assert statistics.median(seconds) < 1
    return sorted(seconds)[-3]


async def matched(fleet: ChaosFleet) -> None:
    """Until the prompt is known to be held by a replica."""

    async def met() -> bool:
        answer = await ask(fleet.url, chat_body(PROMPT, max_tokens=1))
        return int(answer.headers["x-kvroute-matched-tokens"]) > 256

    await fleet.until("a prompt is matched", met, 20)


def available(fleet: ChaosFleet) -> Condition:
    async def met() -> bool:
        return (await fleet.ready())["index"] == "available"

    return met


def unavailable(fleet: ChaosFleet) -> Condition:
    async def met() -> bool:
        return (await fleet.ready())["index"] == "unavailable"

    return met
