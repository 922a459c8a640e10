"""SIGSTOP of a replica: it accepts connections and never answers."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from tests.chaos.client import Answer, ask, chat_body
from tests.chaos.fleet import ChaosFleet, OneReplica, chaos_fleet

pytestmark = pytest.mark.slow

SPEED = ("--prefill-c", "0.3", "--decode-step", "0.1", "--max-num-seqs", "256")
QUICK_PROBES = {"probe_interval_s": 0.3, "probe_timeout_s": 0.3, "first_byte_timeout_s": 20}
SLOW_PROBES = {"probe_interval_s": 1, "probe_timeout_s": 2, "first_byte_timeout_s": 1}


@pytest.mark.parametrize(
    ("settings", "fate"),
    [(QUICK_PROBES, 200), (SLOW_PROBES, 504)],
    ids=["probes notice", "limits end it"],
)
async def test_a_stopped_replica_holds_nothing_up_for_longer_than_its_limits(
    tmp_path: Path, settings: dict[str, float], fate: int
) -> None:
    limits = {"policy": "round_robin", "idle_timeout_s": 1.0, **settings}
    async with chaos_fleet(2, tmp_path, replica=SPEED, **limits) as fleet:
        victim = fleet.replicas[0]
        begun = [Answer() for _ in range(4)]
        tasks = [asyncio.create_task(request(fleet, each)) for each in begun]
        async with asyncio.timeout(20):
            await asyncio.gather(*(each.begun.wait() for each in begun))
        waiting = [Answer() for _ in range(4)]
        tasks += [asyncio.create_task(request(fleet, each)) for each in waiting]
        await placed(fleet, 8)
        victim.signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        await asyncio.gather(*tasks)
        took_s = time.monotonic() - stopped_s
        for answer in begun:
            ended = answer.cut if answer.replica == victim.name else answer.complete
            assert ended, f"{answer}"
        assert [each.status for each in waiting].count(fate) == (4 if fate == 200 else 2)
        assert all(each.complete or each.status == 504 for each in waiting)
        await left_out(fleet, victim)
        left_out_s = time.monotonic() - stopped_s
        for _ in range(6):
            answer = await ask(fleet.url, chat_body("elsewhere", max_tokens=1))
            assert answer.complete and answer.replica != victim.name
        victim.signal(signal.SIGCONT)
        back_s = time.monotonic()
        await used(fleet, victim)
        again_s = time.monotonic() - back_s
        print(f"ended {took_s:.1f} s, left out {left_out_s:.1f} s after SIGSTOP")
        print(f"used again {again_s:.1f} s after SIGCONT")
        assert again_s < 2.0
        await fleet.becomes_idle()


async def request(fleet: ChaosFleet, answer: Answer) -> None:
    await ask(fleet.url, chat_body(f"{id(answer)}", stream=True, max_tokens=20), answer)


async def placed(fleet: ChaosFleet, count: int) -> None:
    async def met() -> bool:
        return sum((await fleet.metric("kvroute_running_requests")).values()) == count

    await fleet.until(f"{count} requests are placed", met)


async def left_out(fleet: ChaosFleet, replica: OneReplica) -> None:
    async def met() -> bool:
        return not (await fleet.ready())["replicas"][replica.name]["healthy"]

    await fleet.until("the stopped replica is left out", met, 5)


async def used(fleet: ChaosFleet, replica: OneReplica) -> None:
    number = 0

    async def met() -> bool:
        nonlocal number
        number += 1
        body = chat_body(f"again {number}", max_tokens=1)
        answers = await asyncio.gather(*(ask(fleet.url, body) for _ in range(2)))
        assert all(each.complete for each in answers), [str(each) for each in answers]
        return any(each.replica == replica.name for each in answers)

    await fleet.until("the replica is used again", met, 10)


async def test_requests_that_wait_for_a_stopped_replica_are_served_before_its_next_probe(
    tmp_path: Path,
) -> None:
    limits = {"policy": "round_robin", "probe_interval_s": 60, "probe_timeout_s": 1}
    async with chaos_fleet(2, tmp_path, replica=SPEED, **limits) as fleet:
        victim = fleet.replicas[0]
        waiting = [Answer() for _ in range(8)]
        tasks = [asyncio.create_task(request(fleet, each)) for each in waiting]
        await placed(fleet, 8)
        victim.signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        await asyncio.gather(*tasks)
        print(f"all served {time.monotonic() - stopped_s:.1f} s after SIGSTOP")
        served = [each for each in waiting if each.complete]
        cut = [each for each in waiting if each.begun.is_set() and each.replica == victim.name]
        assert len(served) + len(cut) == len(waiting) and len(served) > 4
        await left_out(fleet, victim)
        await fleet.becomes_idle()
