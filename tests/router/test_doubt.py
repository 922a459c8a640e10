"""A replica that is silent while requests wait for it is asked whether it lives, out of turn."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.router.support import (
    SSE_HEAD,
    ScriptedReplica,
    Seen,
    answer_ok,
    chat,
    chunk,
    json_answer,
    running_gateway,
)

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
RARE: Any = {"probe_interval_s": 60, "probe_timeout_s": 0.4}
"""What is found out in these tests is not found out by the regular probes."""


class Hung(ScriptedReplica):
    """Once `hangs` is set it takes connections and says nothing on any, but on its streams."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.hangs = False
        self.health_checks = 0
        self.go_on = asyncio.Event()

    async def _read(self, reader: Reader) -> Seen | None:
        seen = await super()._read(reader)
        if seen is not None and seen.target == "/health":
            self.health_checks += 1
        if seen is not None and self.hangs and b'"stream": true' not in seen.body:
            await reader.read(1)
            return None
        return seen

    async def _answer(self, seen: Seen, reader: Reader, writer: Writer) -> None:
        if b'"stream": true' not in seen.body:
            await answer_ok(seen, reader, writer)
            return
        writer.write(SSE_HEAD)
        while not self.go_on.is_set():
            writer.write(chunk(b"data: 1\n\n"))
            await writer.drain()
            await asyncio.sleep(0.05)
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def test_a_hung_replica_is_found_out_between_two_probes() -> None:
    hung, well = Hung(), ScriptedReplica()
    await hung.start()
    await well.start()
    async with running_gateway(hung, well, **RARE) as running:
        hung.hangs = True
        answers = await asyncio.gather(*(running.post(chat()) for _ in range(4)))
        assert [each.status_code for each in answers] == [200] * 4
        assert {each.headers["x-kvroute-replica"] for each in answers} == {well.name}
        state = running.gateway.fleet.replicas[hung.name]
        assert state.state == "down" and "did not answer a probe in time" in state.reason
        await running.becomes_idle()
        hung.hangs = False
        async with asyncio.timeout(5):
            while not state.healthy:
                await asyncio.sleep(0.01)
    await hung.stop()
    await well.stop()


async def test_a_replica_that_speaks_to_others_is_not_down_for_a_late_health_check() -> None:
    """Its engine is busy with somebody's long prompt; it is not hung."""
    busy, well = Hung(), ScriptedReplica()
    await busy.start()
    await well.start()
    async with running_gateway(busy, well, **RARE, first_byte_timeout_s=2.5) as running:
        stream = asyncio.create_task(running.post(chat(stream=True)))
        async with asyncio.timeout(5):
            while not busy.seen:
                await asyncio.sleep(0.01)
        busy.hangs = True
        late = asyncio.gather(*(running.post(chat()) for _ in range(2)))
        await late
        assert sorted(each.status_code for each in late.result()) == [200, 504]
        assert running.gateway.fleet.replicas[busy.name].ready
        busy.go_on.set()
        assert (await stream).text.endswith("data: [DONE]\n\n")
        await running.becomes_idle()
    await busy.stop()
    await well.stop()


async def test_a_long_prefill_is_waited_for() -> None:
    """Silent for seconds, but its health checks are answered: nothing is sent elsewhere."""

    async def slow(seen: Seen, reader: Reader, writer: Writer) -> None:
        await asyncio.sleep(2.2)
        writer.write(json_answer({"slow": True}))

    replica, other = ScriptedReplica(slow), ScriptedReplica(slow)
    await replica.start()
    await other.start()
    async with running_gateway(replica, other, **RARE) as running:
        assert (await running.post(chat())).json() == {"slow": True}
        assert len(replica.seen) + len(other.seen) == 1
        states = [each.state for each in running.gateway.fleet.replicas.values()]
        assert states == ["up", "up"]
    await replica.stop()
    await other.stop()


async def test_doubts_do_not_crowd_out_the_regular_questions() -> None:
    release = asyncio.Event()

    async def wait(seen: Seen, reader: Reader, writer: Writer) -> None:
        await release.wait()
        writer.write(json_answer({}))

    replica = ScriptedReplica(wait)
    await replica.start()
    async with running_gateway(replica, probe_interval_s=1.2) as running:
        asked = asyncio.create_task(running.post(chat()))
        while not replica.seen:
            await asyncio.sleep(0.01)
        replica.models.append("another")
        async with asyncio.timeout(15):  # models are asked for with every fifth regular probe
            while "another" not in running.gateway.fleet.model_names():
                await asyncio.sleep(0.02)
        release.set()
        assert (await asked).status_code == 200
    await replica.stop()
