"""The doctor in a gateway: what it finds, where that is shown, and when it goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from loadgen.replica.server import Language
from loadgen.replica.setup import Events
from router.config import Settings
from router.doctor import watch
from router.status import shown_settings, without_password
from tests.router.simulated import FOLDER, QUICK, Start, language, starting
from tests.router.support import Running, running_gateway

TOKEN = "s3cret"
AUTH = {"authorization": f"Bearer {TOKEN}"}
GIVEN = {"admin_token": TOKEN, "tokenizer": FOLDER, "doctor": "passive"}


@pytest.fixture(scope="module")
def spoken() -> Language:
    return language()


@pytest.fixture
async def start(spoken: Language, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    monkeypatch.setattr(watch, "LOOK_S", 0.02)
    monkeypatch.setattr(watch, "LEAST_PAUSE_S", 0.1)
    async with starting(spoken) as started:
        yield started


async def status(running: Running) -> dict[str, Any]:
    answer = await running.client.get("/admin/status", headers=AUTH)
    assert answer.status_code == 200
    return answer.json()


async def examined(running: Running, *names: str) -> dict[str, Any]:
    """The doctor's part of the status once all of these have been looked at."""
    async with asyncio.timeout(20):
        while True:
            doctor = (await status(running))["doctor"]
            if doctor["examined"].keys() == set(names):
                return doctor
            await asyncio.sleep(0.02)


def codes(doctor: dict[str, Any]) -> list[str]:
    return [each["code"] for each in doctor["findings"]]


async def metric(running: Running, severity: str) -> float:
    text = (await running.client.get("/metrics")).text
    line = f'kvroute_doctor_findings{{severity="{severity}"}} '
    return float(next(each for each in text.splitlines() if each.startswith(line)).split()[-1])


async def test_findings_are_shown_logged_once_and_go_with_their_replica(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvroute.doctor")
    good = (await start()).replicas[0]
    bad = (await start(prefix_caching=False, events=Events.OFF)).replicas[0]
    names = [each.url[7:] for each in (good, bad)]
    async with running_gateway(good.url, bad.url, **GIVEN) as running:
        doctor = await examined(running, *names)
        assert codes(doctor) == ["prefix_caching_off", "events_off"]
        assert {each["replica"] for each in doctor["findings"]} == {names[1]}
        assert all(each["seen"] and each["why"] and each["mend"] for each in doctor["findings"])
        assert (await metric(running, "error"), await metric(running, "warning")) == (2, 0)
        other = (await start()).replicas[0]
        await running.client.post("/admin/replicas", json={"url": other.url}, headers=AUTH)
        await examined(running, *names, other.url[7:])
        warned = [each for each in caplog.records if each.name == "kvroute.doctor"]
        assert [each.levelname for each in warned] == ["WARNING"] * 2
        assert "To mend it: start vLLM with --enable-prefix-caching" in caplog.text
        await running.client.delete(f"/admin/replicas/{names[1]}", headers=AUTH)
        doctor = await examined(running, names[0], other.url[7:])
        assert codes(doctor) == [] and await metric(running, "error") == 0


async def test_what_is_wrong_between_replicas_goes_with_one_of_them(start: Start) -> None:
    one = (await start()).replicas[0]
    other = (await start(block_size_tokens=32, blocks=256)).replicas[0]
    async with running_gateway(one.url, **GIVEN) as running:
        assert codes(await examined(running, one.url[7:])) == []
        await running.client.post("/admin/replicas", json={"url": other.url}, headers=AUTH)
        doctor = await examined(running, one.url[7:], other.url[7:])
        assert codes(doctor) == ["unit_differs"]
        await running.client.delete(f"/admin/replicas/{one.url[7:]}", headers=AUTH)
        assert codes(await examined(running, other.url[7:])) == []


async def test_a_replica_that_is_back_is_examined_again(start: Start) -> None:
    fleet = await start()
    name = fleet.replicas[0].url[7:]
    async with running_gateway(fleet.replicas[0].url, **GIVEN) as running:
        first = await examined(running, name)
        assert codes(first) == []
        fleet._config = replace(fleet._config, engine=replace(QUICK, block_size_tokens=24))
        await fleet.replicas[0].close()
        async with asyncio.timeout(20):
            while (await status(running))["replicas"][name]["state"] != "down":
                await asyncio.sleep(0.02)
            await fleet.restart(0)
            while "unit_misfit" not in codes((await status(running))["doctor"]):
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(("mode", "prompts"), [("passive", 0), ("active", 3)])
async def test_only_an_active_doctor_sends_requests_that_generate(
    start: Start, mode: str, prompts: int
) -> None:
    replica = (await start()).replicas[0]
    async with running_gateway(replica.url, **{**GIVEN, "doctor": mode}) as running:
        doctor = await examined(running, replica.url[7:])
        assert codes(doctor) == []
        assert (doctor["mode"], doctor["examined"][replica.url[7:]]["probed"]) == (
            mode,
            mode == "active",
        )
        assert replica.ranks[0].stats.generated == prompts


async def test_a_doctor_that_is_off_asks_nothing(start: Start) -> None:
    replica = (await start(events=Events.OFF)).replicas[0]
    async with running_gateway(replica.url, **{**GIVEN, "doctor": "off"}) as running:
        await asyncio.sleep(0.3)
        assert (await status(running))["doctor"] == {
            "mode": "off",
            "examined": {},
            "findings": [],
        }


async def test_the_status_tells_all_but_secrets(start: Start) -> None:
    replica = (await start(api_keys=("k-1",))).replicas[0]
    given = {**GIVEN, "replica_api_key": "k-1"}
    async with running_gateway(replica.url, **given) as running:
        assert codes(await examined(running, replica.url[7:])) == []
        said = await status(running)
        assert said.keys() == {
            "version", "ready", "draining", "replicas", "sources", "index", "doctor", "settings"
        }  # fmt: skip
        assert said["replicas"][replica.url[7:]]["state"] == "up" and said["ready"] is True
        assert said["settings"]["policy"] == "round_robin"
        text = str(said)
        assert TOKEN not in text and "k-1" not in text
        assert (await running.client.get("/admin/status")).status_code == 401


def test_passwords_in_urls_are_not_shown() -> None:
    settings = Settings(
        replicas=[{"url": "http://a:1", "api_key": "k-2"}],
        redis_url="redis://user:p4ss@h:6379/0?password=p4ss&db=1",
        admin_token="t0ken",
    )
    text = str(shown_settings(settings))
    assert "redis://user:***@h:6379/0?password=***&db=1" in text
    assert not [each for each in ("p4ss", "k-2", "t0ken") if each in text]
    assert without_password("unix:///run/valkey.sock") == "unix:///run/valkey.sock"
