"""`kvroute explain` as a person meets it, before a gateway that runs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cache_index.types import Holder
from tests.router.support import (
    MODEL,
    SSE_HEAD,
    Running,
    ScriptedReplica,
    Seen,
    TaughtIndex,
    chunk,
    closed_port,
    json_answer,
    running_gateway,
    scripted,
)

pytestmark = pytest.mark.slow

TOKEN = "s3cret-admin"
BODY = json.dumps({"model": MODEL, "prompt": list(range(130))}).encode()
USAGE = {"prompt_tokens": 130, "prompt_tokens_details": {"cached_tokens": 112}}
COMPLETIONS = ("--path", "/v1/completions")


async def answers(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    if b"too long" in seen.body:
        writer.write(json_answer({"error": {"message": "it is \x1b[31mtoo long"}}, "400 Bad"))
    elif b"cut" in seen.body:
        writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
        await writer.drain()
        raise ConnectionError
    else:
        writer.write(json_answer({"usage": USAGE}))


@asynccontextmanager
async def fleet(**settings: object) -> AsyncIterator[tuple[Running, list[ScriptedReplica]]]:
    async with scripted(answers, answers) as replicas:
        held = {Holder(replicas[1].name, 0, "device"): 7}
        index = TaughtIndex(lambda root, hashes: held)
        given = {"admin_token": TOKEN, "policy": "cost", "index": index, **settings}
        async with running_gateway(*replicas, **given) as running:
            yield running, replicas


async def explain(
    port: int, *arguments: str, body: bytes = b"", token: str = TOKEN
) -> tuple[int, str, str]:
    """Exit code, and what was printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router.cli", "explain", *arguments),
        *("--url", f"http://127.0.0.1:{port}"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"KVROUTE_ADMIN_TOKEN": token, "COLUMNS": "200", "PYTHONPATH": ":".join(sys.path)},
    )
    async with asyncio.timeout(30):
        out, err = await process.communicate(body)
    code = process.returncode
    assert code is not None and b"Traceback" not in err, err
    return code, out.decode(), err.decode()


async def test_it_shows_candidates_the_choice_and_why_and_sends_nothing(tmp_path: Path) -> None:
    file = tmp_path / "body.json"
    file.write_bytes(BODY)
    async with fleet() as (running, replicas):
        code, shown, _ = await explain(running.port, str(file), *COMPLETIONS)
        assert code == 0
        rows = [line.split() for line in shown.splitlines() if "127.0.0.1:" in line]
        assert rows[0][:3] == ["->", f"{replicas[1].name}/0", "112"]
        assert rows[1][:2] == [f"{replicas[0].name}/0", "0"]
        assert f"{replicas[1].name}/0 holds 112 of 130 tokens" in shown
        assert "it publishes no KV events" in shown
        assert [each.seen for each in replicas] == [[], []]
        code, told, _ = await explain(running.port, "-", *COMPLETIONS, "--json", body=BODY)
        assert (code, json.loads(told)["chosen"]["replica"]) == (0, replicas[1].name)


async def test_what_is_sent_is_shown_with_what_really_happened() -> None:
    async with fleet() as (running, replicas):
        code, shown, _ = await explain(running.port, "-", *COMPLETIONS, "--send", body=BODY)
        assert code == 0
        assert f"answered by {replicas[1].name}/0, status 200" in shown
        assert "112 of 130 tokens, says the engine; predicted 112" in shown
        (seen,) = replicas[1].seen
        assert seen.body == BODY
        sent = seen.header("x-request-id")
        assert sent is not None and sent in shown
        again = await explain(running.port, "--request-id", sent)
        assert again == (0, shown, "")


async def test_a_request_that_ends_badly_is_shown_and_exits_1() -> None:
    async with fleet() as (running, replicas):
        long = json.dumps({"model": MODEL, "prompt": "too long"}).encode()
        code, shown, said = await explain(running.port, "-", *COMPLETIONS, "--send", body=long)
        assert (code, "status 400" in shown) == (1, True)
        assert "too long" in said and "\x1b" not in said
        cut = json.dumps({"model": MODEL, "prompt": "cut", "stream": True}).encode()
        code, shown, _ = await explain(running.port, "-", *COMPLETIONS, "--send", body=cut)
        assert (code, "cut: the answer had begun and broke off" in shown) == (1, True)


async def test_what_cannot_be_shown_is_a_sentence_and_exits_2(tmp_path: Path) -> None:
    async with fleet() as (running, replicas):
        odd = json.dumps({"model": "none", "prompt": "x"}).encode()
        dead, replica = closed_port(), replicas[0].port
        for port, arguments, body, says in (
            (running.port, [], b"", "give a BODY.json"),
            (running.port, ["x", "--request-id", "y"], b"", "give a BODY.json"),
            (running.port, ["--request-id", "y", "--send"], b"", "--send needs a BODY.json"),
            (running.port, [str(tmp_path / "none")], b"", "No such file"),
            (running.port, ["-"], b"{", "standard input: The request body is not valid JSON"),
            (running.port, ["-", *COMPLETIONS], odd, "'none' is not served here"),
            (running.port, ["-", "--path", "/v1/files"], BODY, "No explanations for '/v1/files'"),
            (running.port, ["--request-id", "gone"], b"", "No receipt of the request 'gone'"),
            (dead, ["-"], BODY, f"cannot reach a gateway at http://127.0.0.1:{dead}"),
            (replica, ["--request-id", "a"], b"", "is it a kvroute gateway?"),
        ):
            code, shown, said = await explain(port, *arguments, body=body)
            assert (code, shown, says in said) == (2, "", True), said
        code, _, said = await explain(running.port, "-", *COMPLETIONS, body=BODY, token="wrong")
        assert (code, "KVROUTE_ADMIN_TOKEN" in said) == (2, True)
    async with fleet(receipts=0) as (running, replicas):
        code, _, said = await explain(running.port, "-", *COMPLETIONS, "--send", body=BODY)
        assert (code, "`receipts` is 0" in said) == (2, True)
        assert [each.seen for each in replicas] == [[], []]
