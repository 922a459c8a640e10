import asyncio
import socket
from time import monotonic

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadgen.client import Client, Deadlines
from loadgen.outcome import Outcome
from loadgen.workload import Chat, Completion
from tests.loadgen.scripted import (
    chat_events,
    chunk,
    event,
    scripted_server,
    status,
    stream,
    usage,
)

CHAT = Chat((("system", "be brief"), ("user", "hello")), max_tokens=4)


async def send(url, request=CHAT, **deadlines) -> Outcome:
    async with Client(url, "sim", deadlines=Deadlines(**deadlines)) as client:
        return await client.send(request, Outcome(0, 0, monotonic()))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 600), max_size=12))
async def test_measures_a_chat_stream_however_it_is_cut(cuts):
    events = chat_events(["one", " two", " three"], prompt_tokens=40, cached_tokens=32)
    cuts = sorted(min(cut, len(events)) for cut in cuts)
    async with scripted_server(lambda path, body: stream(events, cuts, "r7")) as server:
        outcome = await send(server.url)
    assert (outcome.error, outcome.reply, outcome.replica) == (None, "one two three", "r7")
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens) == (40, 32, 3)
    assert outcome.matched_tokens == 16
    assert outcome.due_s <= outcome.sent_s <= outcome.first_token_s <= outcome.done_s
    assert len(outcome.gaps_s) == 2 and min(outcome.gaps_s) >= 0


async def test_sends_what_an_openai_server_expects():
    async with scripted_server(lambda path, body: stream(chat_events(["x"]))) as server:
        await send(server.url)
    [(path, body)] = server.requests
    assert path == "/v1/chat/completions"
    assert body["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["max_tokens"]) == ("sim", 4)


async def test_completions_have_text_instead_of_a_delta():
    chunks = [{"choices": [{"text": " a"}]}, {"choices": [{"text": " b"}]}]
    chunks.append({"choices": [], "usage": usage(9, 0, 2)})
    events = b"".join(event(orjson.dumps(one)) for one in chunks) + event(b"[DONE]")
    async with scripted_server(lambda path, body: stream(events)) as server:
        outcome = await send(server.url, Completion(" some prompt", 2))
    assert (outcome.error, outcome.reply, outcome.prompt_tokens) == (None, " a b", 9)
    assert server.requests == [("/v1/completions", server.requests[0][1])]
    assert server.requests[0][1]["prompt"] == " some prompt"


async def test_the_role_chunk_is_not_the_first_token():
    events = chat_events(["x"])
    role_end = events.index(b"\n\n") + 2
    gate = asyncio.Event()
    script = stream(events, [role_end])
    script.insert(2, gate)
    async with (
        scripted_server(lambda path, body: script) as server,
        Client(server.url, "sim") as client,
    ):
        loop = asyncio.get_running_loop()
        outcome = Outcome(0, 0, loop.time())
        sending = asyncio.create_task(client.send(CHAT, outcome))
        await asyncio.wait([sending], timeout=0.05)
        assert not sending.done() and outcome.first_token_s is None
        opened_s = loop.time()
        gate.set()
        await sending
    assert outcome.first_token_s >= opened_s


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (status(503), "http_503"),
        (status(400), "http_400"),
        (stream(event(b'{"error": {"message": "replica died"}}')), "stream_error"),
        (stream(event(b"{not json")), "malformed"),
        (stream(event(b"[1]")), "malformed"),
        (stream(chat_events([])), "empty"),
        (stream(chat_events(["x"]).removesuffix(event(b"[DONE]"))), "truncated"),
        (stream(chat_events(["x"]))[:-1], "truncated"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort"], "truncated"),
    ],
)
async def test_failures_have_a_kind(script, kind):
    async with scripted_server(lambda path, body: script) as server:
        outcome = await send(server.url)
    assert outcome.error == kind
    assert outcome.done_s is not None


async def test_tokens_before_an_error_do_not_make_the_answer_whole():
    events = chat_events(["x"]).removesuffix(event(b"[DONE]")) + event(b'{"error": "gone"}')
    async with scripted_server(lambda path, body: stream(events)) as server:
        outcome = await send(server.url)
    assert outcome.error == "stream_error" and outcome.first_token_s is not None


async def test_nobody_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        outcome = await send(f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert outcome.error == "connect"


@pytest.mark.parametrize("deadline", [{"read_s": 0.05}, {"total_s": 0.05}])
async def test_a_silent_server_meets_a_deadline(deadline):
    def script(path, body):
        return [stream(b"")[0], chunk(event(b'{"choices": []}')), asyncio.Event()]

    async with scripted_server(script) as server:
        outcome = await send(server.url, **deadline)
    assert outcome.error == "timeout"
    assert outcome.done_s - outcome.sent_s < 2


async def test_connections_are_kept():
    async with (
        scripted_server(lambda path, body: stream(chat_events(["x"]))) as server,
        Client(server.url, "sim") as client,
    ):
        for _ in range(5):
            assert (await client.send(CHAT, Outcome(0, 0, 0.0))).error is None
    assert server.connections == 1
