"""The npm client `openai`, unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.conftest import NODE, Served
from tests.contract.script import run

pytestmark = [pytest.mark.node, pytest.mark.slow]


def node(served: Served, case: str, **kw: Any) -> Any:
    return run(["node", str(NODE / "client.js"), served.url, case], **kw)


def test_chat_streaming_and_not_say_the_same(served: Served) -> None:
    whole, streamed = node(served, "chat"), node(served, "stream")
    assert whole["text"] and whole["text"] == streamed["text"]
    assert whole["replica"] == served.replica.name
    assert whole["usage"]["completion_tokens"] == streamed["usage"]["completion_tokens"] == 8


def test_completions_and_models(served: Served) -> None:
    assert node(served, "completion")["text"]
    assert node(served, "models") == ["sim-model"]


def test_errors_are_of_the_right_class(served: Served) -> None:
    errors = node(served, "errors")
    assert errors["unknown"]["name"] == "NotFoundError"
    assert errors["unknown"]["code"] == "model_not_found"
    assert "sim-model" in errors["unknown"]["message"]
    assert errors["bad"]["name"] == errors["malformed"]["name"] == "BadRequestError"
    assert errors["route"]["name"] == "NotFoundError"


def test_a_timeout_is_one_and_ends_the_request(served: Served) -> None:
    assert node(served, "timeout")["name"] == "APIConnectionTimeoutError"


def test_leaving_a_stream_ends_the_request(served: Served) -> None:
    assert node(served, "leave") == {"left": True}


def test_a_cut_stream_is_an_exception(served: Served) -> None:
    error = node(served, "cut", on_begun=served.kill)
    assert error["name"] == "APIError" and "broke off" in error["message"]


def test_a_cut_answer_is_an_exception(served: Served) -> None:
    def kill() -> None:
        served.whole.wait(lambda: running(served) == 1)
        served.kill()

    error = node(served, "cut_whole", on_begun=kill)
    assert error["name"] == "InternalServerError" and error["status"] == 503


def running(served: Served) -> float:
    lines = served.client.get("/metrics").text.splitlines()
    values = [line for line in lines if line.startswith("kvroute_running_requests{")]
    return sum(float(line.rpartition(" ")[2]) for line in values)
