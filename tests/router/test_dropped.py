"""Replicas that take a request and close without a word: how many of them one request may meet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import openai
import pytest

from cache_index.types import Holder
from tests.router.support import (
    Running,
    ScriptedReplica,
    Seen,
    TaughtIndex,
    answer_ok,
    chat,
    running_gateway,
    scripted,
)

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


class Mortal(ScriptedReplica):
    """Dies of a request while `deaths` has any left: nobody listens, every connection is cut."""

    def __init__(self, deaths: list[str]) -> None:
        super().__init__(self._serve_or_die)
        self._deaths = deaths

    async def _serve_or_die(self, seen: Seen, reader: Reader, writer: Writer) -> None:
        if not self._deaths:
            await answer_ok(seen, reader, writer)
            return
        self._deaths.pop()
        assert self._server is not None
        self._server.close()
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        raise ConnectionResetError


@asynccontextmanager
async def mortals(
    count: int, deaths: int, **settings: Any
) -> AsyncIterator[tuple[Running, list[Mortal]]]:
    """Of `count` replicas, those that are asked first die: as many as `deaths` says."""
    left = ["death"] * deaths
    replicas = [Mortal(left) for _ in range(count)]
    for replica in replicas:
        await replica.start()
    try:
        async with running_gateway(*replicas, probe_interval_s=30, **settings) as running:
            yield running, replicas
            await running.becomes_idle()
    finally:
        for replica in replicas:
            await replica.stop()


async def hang_up(seen: Seen, reader: Reader, writer: Writer) -> None:
    writer.transport.abort()


def asked(replicas: list[Any]) -> int:
    return sum(len(replica.seen) for replica in replicas)


@pytest.mark.parametrize("budget", [0.0, 0.2])
async def test_two_deaths_in_a_row_cost_a_request_nothing(budget: float) -> None:
    """Whatever the budget: what died costs the fleet nothing more by being replaced."""
    async with mortals(3, 2, retry_budget=budget) as (running, replicas):
        answer = await running.post(chat())
        assert (answer.status_code, answer.json()) == (200, {"ok": True})
        assert [len(each.seen) for each in replicas] == [1, 1, 1]


async def test_a_request_that_kills_engines_takes_three_of_five_and_no_more() -> None:
    async with mortals(5, 5) as (running, replicas):
        answer = await running.post(chat())
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "request_dropped")
        assert error["message"].startswith("3 replicas, one after the other,")
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers
        assert asked(replicas) == 3
        fleet = running.gateway.fleet.replicas
        assert [fleet[each.name].healthy for each in replicas].count(True) >= 2


async def test_the_openai_client_does_not_repeat_what_kills_engines() -> None:
    async with mortals(5, 5) as (running, replicas):
        url = f"http://127.0.0.1:{running.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=5) as client:
            with pytest.raises(openai.InternalServerError) as dropped:
                await client.completions.create(model="sim", prompt="x")
        assert dropped.value.code == "request_dropped"
        assert asked(replicas) == 3


@pytest.mark.parametrize(("budget", "sent"), [(0.2, 3), (0.0, 2)])
async def test_replicas_that_hang_up_but_live_are_tried_within_the_budget(
    budget: float, sent: int
) -> None:
    async with scripted(*[hang_up] * 5) as replicas:
        async with running_gateway(*replicas, retry_budget=budget) as running:
            answer = await running.post(chat())
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "request_dropped")
            assert asked(replicas) == sent
            assert all(each.healthy for each in running.gateway.fleet.replicas.values())
            await running.becomes_idle()


async def test_what_must_not_be_repeated_says_so_to_clients_that_retry() -> None:
    async with scripted(hang_up, hang_up) as replicas:
        async with running_gateway(*replicas) as running:
            answer = await running.client.post("/v1/unknown", json={"a": 1})
            assert answer.headers["x-should-retry"] == "false"
            error = json.loads(answer.content)["error"]
            assert error["message"].startswith("The replica took this request")
            assert asked(replicas) == 1


class Crowded(ScriptedReplica):
    """Dies of a poison, with all that wait here; everybody else waits until `go_on`."""

    def __init__(self, go_on: asyncio.Event) -> None:
        super().__init__(self._wait_or_die)
        self._go_on = go_on
        self.dead = False

    async def _wait_or_die(self, seen: Seen, reader: Reader, writer: Writer) -> None:
        if b"poison" in seen.body:
            assert self._server is not None
            self._server.close()
            self.dead = True
            for task in self._tasks - {asyncio.current_task()}:
                task.cancel()
            raise ConnectionResetError
        await self._go_on.wait()
        await answer_ok(seen, reader, writer)


async def test_those_who_died_beside_a_poison_twice_are_kept_apart_from_it() -> None:
    """All share a prefix and follow it to the same replica; the third time each is alone."""
    go_on, index = asyncio.Event(), TaughtIndex()
    replicas = [Crowded(go_on) for _ in range(6)]
    for replica in replicas:
        await replica.start()
    held = {Holder(each.name, 0, "device"): 9 - n for n, each in enumerate(replicas)}
    index.holds = lambda root, hashes: held

    def prompt(user: str) -> bytes:
        return json.dumps({"model": "sim", "prompt": list(range(400)), "user": user}).encode()

    settings = {"policy": "prefix_only", "probe_interval_s": 30, "index": index}
    async with running_gateway(*replicas, **settings) as running:
        ask = partial(running.post, path="/v1/completions")
        innocent = [asyncio.create_task(ask(prompt(f"{n}"))) for n in range(3)]
        async with asyncio.timeout(10):
            while max(len(each.seen) for each in replicas) < len(innocent):
                await asyncio.sleep(0.01)
        poison = await ask(prompt("poison"))
        assert poison.json()["error"]["code"] == "request_dropped"
        assert [each.dead for each in replicas].count(True) == 3
        go_on.set()
        answers = await asyncio.gather(*innocent)
        assert [each.status_code for each in answers] == [200] * len(innocent)
        assert len({each.headers["x-kvroute-replica"] for each in answers}) == len(innocent)
        assert not running.gateway.relay._dispatcher._drops._suspects
        await running.becomes_idle()
    for replica in replicas:
        await replica.stop()
