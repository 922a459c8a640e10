"""litellm as a client, unchanged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import Served
from tests.contract.script import run

pytestmark = [pytest.mark.contract, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("litellm_client.py")


def litellm(served: Served, case: str, **kw: Any) -> Any:
    return run([sys.executable, str(SCRIPT), served.url, case], **kw)


def test_both_ways_streaming_and_not_say_the_same(served: Served) -> None:
    seen = litellm(served, "chat")
    whole, *others = seen["texts"]
    assert whole and others == [whole] * 3
    assert seen["completion_tokens"] == 8


def test_errors_are_of_the_right_class(served: Served) -> None:
    errors = litellm(served, "errors")
    assert "NotFoundError" in errors["unknown"]["kinds"]
    assert "sim-model" in errors["unknown"]["message"]
    assert "BadRequestError" in errors["bad"]["kinds"]


def test_a_cut_stream_is_an_exception(served: Served) -> None:
    error = litellm(served, "cut", on_begun=served.kill)
    assert "APIError" in error["kinds"] and "broke off" in error["message"]
