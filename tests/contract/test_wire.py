"""curl and bare sockets: what is on the wire, and what a client's exit status says of it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
from contextlib import closing

import pytest

from tests.chaos.client import address, chat_body, head
from tests.contract.conftest import Served

pytestmark = pytest.mark.slow
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def curl(served: Served, *options: str, body: bytes) -> subprocess.CompletedProcess[bytes]:
    url = f"{served.url}/v1/chat/completions"
    command = ["curl", "-sS", "-N", url, "-H", "content-type: application/json", "-d", "@-"]
    return subprocess.run([*command, *options], input=body, capture_output=True, timeout=30)


@needs_curl
@pytest.mark.parametrize("options", [(), ("--http1.0",), ("-H", "transfer-encoding: chunked")])
def test_curl_gets_whole_answers(served: Served, options: tuple[str, ...]) -> None:
    done = curl(served, *options, body=chat_body(max_tokens=3))
    assert done.returncode == 0 and json.loads(done.stdout)["choices"][0]["message"]["content"]
    done = curl(served, *options, body=chat_body(max_tokens=3, stream=True))
    assert done.returncode == 0 and done.stdout.endswith(b"data: [DONE]\n\n")


@needs_curl
def test_curl_sends_a_large_body_after_the_gateway_says_continue(served: Served) -> None:
    body = chat_body("word " * 2000, max_tokens=1)
    done = curl(served, "-v", "-H", "expect: 100-continue", body=body)
    assert done.returncode == 0 and b"100 Continue" in done.stderr


@needs_curl
def test_curl_fails_on_a_cut_stream(served: Served) -> None:
    """Status 18: a partial transfer. A script with `set -e` does not go on with half an answer."""
    timer = threading.Timer(1.0, served.kill)
    timer.start()
    try:
        done = curl(served, body=chat_body(max_tokens=4000, stream=True))
    finally:
        timer.join()
    assert done.returncode == 18, (done.returncode, done.stderr)
    *events, last = done.stdout.rstrip(b"\n").split(b"\n\n")
    assert events and last.startswith(b"event: error\ndata: ")
    assert b"[DONE]" not in done.stdout


def exchange(served: Served, *pieces: bytes) -> bytes:
    """Everything the gateway sends until it closes, or has been silent for a second."""
    with closing(socket.create_connection(address(served.url), timeout=1.0)) as sock:
        for piece in pieces:
            sock.sendall(piece)
        got = b""
        try:
            while part := sock.recv(65536):
                got += part
        except TimeoutError:
            pass
        return got


def test_requests_in_one_segment_are_answered_in_turn(served: Served) -> None:
    first = chat_body("first", max_tokens=1)
    second = chat_body("second", max_tokens=1, stream=True)
    got = exchange(served, head(first) + first + head(second) + second)
    assert got.count(b"HTTP/1.1 200 ") == 2
    assert got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_request_in_single_bytes_is_a_request(served: Served) -> None:
    body = chat_body(max_tokens=1)
    sent = head(body) + body
    got = exchange(served, *(sent[i : i + 1] for i in range(len(sent))))
    assert got.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "framing",
    [
        "content-length: 5\r\ncontent-length: 6\r\n",
        "content-length: 5\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked, identity\r\n",
        "content-length: -1\r\n",
        "content-length: 5x\r\n",
    ],
)
def test_ambiguous_framing_is_refused(served: Served, framing: str) -> None:
    """What two servers could read in two ways is how requests are smuggled."""
    request = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{framing}\r\n"
    got = exchange(served, request.encode() + b"0\r\n\r\nGET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 400 ")
    assert got.count(b"HTTP/1.1 ") == 1 and b"alive" not in got


@pytest.mark.parametrize(
    "line", ["GET /livez", "GET /livez HTTP/9.9", "\x16\x03\x01\x02", "POST  HTTP/1.1"]
)
def test_what_is_no_request_is_a_400_and_closes(served: Served, line: str) -> None:
    got = exchange(served, line.encode("latin-1") + b"\r\nhost: x\r\n\r\n")
    assert got == b"" or got.startswith(b"HTTP/1.1 400 ")


def test_header_values_cannot_split_a_request(served: Served) -> None:
    body = chat_body(max_tokens=1)
    extra = "x-request-id: a\x00b\r\n"
    got = exchange(served, head(body, extra=extra) + body)
    assert got.startswith(b"HTTP/1.1 400 ") or b"\x00" not in got
