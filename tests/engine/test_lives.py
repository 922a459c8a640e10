"""What ends or changes under a running gateway: clients, cached blocks, the engine itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.engine.gateway import CHAT, Gateway, Tap, ask, ask_known, chat, eventually, prose
from tests.engine.replica import BLOCK_TOKENS, BLOCKS, MODEL, Replica

pytestmark = pytest.mark.engine

ABORT_DEADLINE_S = 10.0
UP_DEADLINE_S = 30.0
CLIENT = """
import sys, httpx
json = {"content-type": "application/json"}
httpx.post(sys.argv[1], content=sys.argv[2], headers=json, timeout=300).raise_for_status()
"""


@pytest.fixture(scope="module")
def gateway(replica: Replica, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    with Gateway(folder, [replica.url], replica.model_folder) as running:
        yield running


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_killed_client_ends_its_request_in_the_engine(
    gateway: Gateway, replica: Replica, stream: bool
) -> None:
    body = chat(prose(f"streamed {stream}", 4), max_tokens=3500, ignore_eos=True, stream=stream)
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, f"{gateway.url}{CHAT}", json.dumps(body)],
        stdout=subprocess.DEVNULL,
    )
    try:
        assert eventually(lambda: replica.requests() == (1, 0), 30)
        assert client.poll() is None
    finally:
        client.kill()
        client.wait()
    assert eventually(lambda: replica.requests() == (0, 0), ABORT_DEADLINE_S)


def test_what_was_evicted_is_no_longer_credited(gateway: Gateway) -> None:
    """Fill the cache with other prompts: prediction and truth still agree on the first one."""
    body = chat(prose("the one to be forgotten", 20), max_tokens=1)
    ask(gateway.url, body)
    before = ask_known(gateway.url, body)
    assert before.matched == before.cached == before.most
    filled = 0
    while filled <= BLOCKS * BLOCK_TOKENS:
        filled += ask(gateway.url, chat(prose(f"filling {filled}", 80), max_tokens=1)).prompt
    after = ask(gateway.url, body)
    assert after.matched == after.cached < after.most


async def test_the_body_arrives_unchanged(
    replica: Replica, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Spelling, order, spaces and unknown fields: byte for byte what the client sent."""
    body = (
        b'{ "max_tokens" : 2,\n\t"temperature":0.0e0,"x-unknown":[1.50,{}],"messages":[ {"role":'
        b'"user","content":"Gr\\u00fc\\u00dfe \xe5\x8c\x97\xe4\xba\xac \\/ \xf0\x9f\x98\x80"}], '
        b'"return_token_ids": true, "model":"' + MODEL.encode() + b'" }\n'
    )
    headers = {"content-type": "application/json"}
    async with Tap(replica.port) as tap, httpx.AsyncClient(timeout=60) as client:
        direct = await client.post(f"{replica.url}{CHAT}", content=body, headers=headers)
        gateway = Gateway(tmp_path_factory.mktemp("tapped"), [tap.url], replica.model_folder)
        async with gateway.apart():
            answer = await client.post(f"{gateway.url}{CHAT}", content=body, headers=headers)
        assert answer.status_code == direct.status_code == 200
        assert answer.json()["prompt_token_ids"] == direct.json()["prompt_token_ids"]
        requests = [bytes(sent) for sent in tap.sent if f"POST {CHAT} ".encode() in sent]
        assert len(requests) == 1
        head, _, sent_body = requests[0].partition(b"\r\n\r\n")
        assert sent_body == body
        assert f"content-length: {len(body)}".encode() in head.lower()


def test_a_restarted_replica_gets_no_credit_for_its_old_life(
    gateway: Gateway, replica: Replica
) -> None:
    body = chat(prose("a prompt of the old life", 60))
    ask(gateway.url, body)
    before = ask_known(gateway.url, body)
    assert before.matched == before.cached == before.most

    replica.kill()
    refused = httpx.post(f"{gateway.url}{CHAT}", json=body, timeout=30)
    assert refused.status_code == 503
    replica.start()

    def served() -> bool:
        return httpx.get(f"{gateway.url}/readyz", timeout=5).status_code == 200

    assert eventually(served, UP_DEADLINE_S), gateway.log_tail()
    # At the first moment it can be asked, not once the index has caught up.
    first = ask(gateway.url, body)
    assert (first.matched, first.cached) == (0, 0)
    gateway.wait_exact()
    again = ask_known(gateway.url, body)
    assert again.matched == again.cached == again.most
