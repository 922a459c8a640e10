"""Answers that are not the relay's: request ids, accounts, methods, shapes of errors."""

from __future__ import annotations

import json
import logging

import pytest

from tests.router.support import Running, json_answer, running_gateway, scripted
from tests.router.test_lists import _unused
from tests.router.test_surface import script_of

ERRORS = [
    ("GET", "/nowhere", 404, "not_found"),
    ("PUT", "/metrics", 405, "method_not_allowed"),
    ("GET", "/v1/models/none", 404, "model_not_found"),
    ("GET", "/admin/replicas", 403, "admin_disabled"),
    ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
    ("DELETE", "/v1/embeddings", 405, "method_not_allowed"),
    ("PUT", "/v1/files", 405, "method_not_allowed"),
]


@pytest.mark.parametrize(("method", "path", "status", "code"), ERRORS)
async def test_every_error_carries_the_requests_id(
    method: str, path: str, status: int, code: str
) -> None:
    async with scripted(_unused) as (replica,), running_gateway(replica) as running:
        answer = await running.client.request(method, path, headers={"x-request-id": "mine-1"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, code)
        assert error["request_id"] == answer.headers["x-kvroute-request-id"] == "mine-1"
        made = await running.client.request(method, path)
        assert len(made.json()["error"]["request_id"]) == 32


async def test_a_wrong_method_says_which_is_right_and_reaches_no_replica() -> None:
    async with scripted(_unused) as (replica,), running_gateway(replica) as running:
        wrong = await running.client.put("/v1/chat/completions", json={"model": "sim"})
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        files = await running.client.put("/v1/files")
        assert files.headers["allow"] == "GET, POST"
        anthropic = await running.client.get("/v1/messages")
        assert anthropic.json()["type"] == "error"
        assert "POST" in anthropic.json()["error"]["message"]


async def test_a_browsers_preflight_is_answered_by_the_engine() -> None:
    allowed = script_of(lambda seen: json_answer({}, extra="access-control-allow-origin: *\r\n"))
    async with scripted(allowed) as (replica,), running_gateway(replica) as running:
        answer = await running.client.options(
            "/v1/chat/completions", headers={"origin": "http://a"}
        )
        assert answer.headers["access-control-allow-origin"] == "*"
        assert (replica.seen[0].method, replica.seen[0].header("origin")) == ("OPTIONS", "http://a")


async def test_every_answer_is_accounted_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvroute.access"):
        async with (
            scripted(_unused) as (replica,),
            running_gateway(replica, access_log=True) as running,
        ):
            for path in ("/v1/models", "/nowhere", "/livez", "/v1/models/none"):
                await running.client.get(path, headers={"x-request-id": "n-7"})
            await running.client.request("HEAD", "/readyz")
            lines = [json.loads(each.getMessage()) for each in caplog.records]
            assert [(each["path"], each["status"]) for each in lines] == [
                ("/v1/models", 200),
                ("/nowhere", 404),
                ("/v1/models/none", 404),
            ]
            assert {each["request_id"] for each in lines} == {"n-7"}
            counted = await _counted(running)
            assert counted['{code="200",route="/v1/models"}'] == 1.0
            assert counted['{code="404",route="none"}'] == 1.0
            assert counted['{code="200",route="/livez"}'] == 1.0


async def test_a_relayed_request_is_accounted_for_once() -> None:
    answer = script_of(lambda seen: json_answer({"id": "x"}))
    async with scripted(answer) as (replica,), running_gateway(replica) as running:
        done = await running.client.post("/v1/embeddings", json={"model": "sim", "input": "x"})
        assert done.headers.get_list("x-kvroute-request-id") == [
            replica.seen[0].header("x-request-id")
        ]
        counted = await _counted(running)
        assert {k: v for k, v in counted.items() if "embeddings" in k} == {
            '{code="200",route="/v1/embeddings"}': 1.0
        }


async def test_a_fault_of_our_own_has_a_shape_too() -> None:
    async with scripted(_unused) as (replica,), running_gateway(replica) as running:
        running.gateway.catalogue.cards = lambda: 1 / 0  # type: ignore[method-assign, assignment]
        answer = await running.client.get("/v1/models")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert answer.headers["x-kvroute-request-id"] == answer.json()["error"]["request_id"]


async def _counted(running: Running) -> dict[str, float]:
    text = (await running.client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("kvroute_requests_total")]
    found = (line.removeprefix("kvroute_requests_total").rsplit(" ", 1) for line in lines)
    return {labels: float(value) for labels, value in found}
