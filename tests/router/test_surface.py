"""Every data route: which replica gets it, what it gets, and what is refused before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from cache_index.types import Holder
from loadgen.tokenizer import default_folder
from router.routes import ROUTES, Kind
from tests.router.support import (
    SSE_HEAD,
    ScriptedReplica,
    Seen,
    TaughtIndex,
    answer_ok,
    chat,
    chunk,
    json_answer,
    running_gateway,
    scripted,
)

MODEL_ROUTES = [route.path for route in ROUTES if route.kind is Kind.MODEL]


def script_of(answer: Callable[[Seen], bytes]):
    async def script(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(answer(seen))

    return script


@pytest.mark.parametrize("path", [*MODEL_ROUTES, "/v1/responses", "/v1/messages"])
async def test_json_routes_reach_a_replica_that_serves_the_model(path: str) -> None:
    async with scripted(answer_ok, answer_ok) as (one, two):
        one.models, two.models = ["other"], ["sim"]
        two.unrecorded.discard("/tokenize")
        async with running_gateway(one, two) as running:
            body = b'{"model":"sim", "input":"x","messages":[], "odd":1.0}'
            for _ in range(2):
                answer = await running.post(body, path=path)
                assert (answer.status_code, answer.json()) == (200, {"ok": True})
            assert [each.body for each in two.seen] == [body, body]
            assert (two.seen[0].target, one.seen) == (path, [])
            unknown = await running.post(b'{"model":"none","messages":[]}', path=path)
            assert unknown.status_code == 404
            assert "Available models: 'other', 'sim'" in unknown.json()["error"]["message"]


async def test_errors_on_anthropic_routes_have_anthropics_shape() -> None:
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = await running.post(b'{"model":"none","messages":[]}', path=path)
            content = answer.json()
            assert (answer.status_code, content["type"]) == (404, "error")
            assert content["error"]["type"] == "not_found_error"
            assert content["request_id"] == answer.headers["x-kvroute-request-id"]
        wrong = await running.client.get("/v1/messages")
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
        broken = await running.post(b"{", path="/v1/messages")
        assert broken.json()["error"]["type"] == "invalid_request_error"


async def test_our_errors_carry_the_request_id() -> None:
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        answer = await running.post(b"{", headers={"x-request-id": "mine"})
        assert answer.json()["error"]["request_id"] == "mine"


async def test_an_alias_reaches_the_model_and_changes_nothing_else() -> None:
    aliases = {"gpt": "sim"}
    async with scripted(answer_ok) as (replica,):
        async with running_gateway(replica, model_aliases=aliases) as running:
            await running.post(b'{ "model" : "gpt", "messages":[], "x": 1e400}')
            await running.post(b'{"input":"a","model":"gpt"}', path="/v1/embeddings")
            bodies = [each.body for each in replica.seen]
            assert bodies[0] == b'{ "model" : "sim", "messages":[], "x": 1e400}'
            assert bodies[1] == b'{"input":"a","model":"sim"}'
            twice = await running.post(b'{"model":"x","model":"gpt","messages":[]}')
            assert (twice.status_code, twice.json()["error"]["param"]) == (400, "model")
            listed = (await running.client.get("/v1/models")).json()["data"]
            assert [card["id"] for card in listed] == ["sim", "gpt"]
            one = (await running.client.get("/v1/models/gpt")).json()
            assert (one["id"], one["kvroute_replicas"]) == ("gpt", [replica.name])
            missing = await running.client.get("/v1/models/nope")
            assert missing.json()["error"]["code"] == "model_not_found"


async def test_other_routes_pass_with_method_query_and_body() -> None:
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            answer = await running.client.request(
                method, "/v1/new/thing?a=%20b", content=b"\x00raw", headers={"x-a": "b"}
            )
            assert answer.status_code == 200
            seen = replica.seen[-1]
            assert (seen.method, seen.target) == (method, "/v1/new/thing?a=%20b")
            assert (seen.body, seen.header("x-a")) == (b"\x00raw", "b")


async def test_a_get_passes_too() -> None:
    async with scripted(answer_ok) as (replica,):
        replica.gets = {"/v1/some/list?limit=2": json_answer({"data": [1]})}
        async with running_gateway(replica) as running:
            answer = await running.client.get("/v1/some/list?limit=2")
            assert answer.json() == {"data": [1]}
            assert (await running.client.get("/v1/not/there")).status_code == 404


async def test_a_pin_chooses_the_replica_where_it_is_allowed() -> None:
    async with scripted(answer_ok, answer_ok) as (one, two):
        async with running_gateway(one, two, allow_pin=True) as running:
            for target in (one, two, two):
                answer = await running.post(chat(), headers={"x-kvroute-pin": f"{target.name}/0"})
                assert answer.headers["x-kvroute-replica"] == target.name
            for wrong in ("nobody", f"{one.name}/7", f"{one.name}/x"):
                refused = await running.post(chat(), headers={"x-kvroute-pin": wrong})
                assert refused.status_code == 400 and one.name in refused.text
            await two.stop()
            down = await running.post(chat(), headers={"x-kvroute-pin": two.name})
            assert (down.status_code, down.json()["error"]["code"]) == (503, "no_replica")
            await two.start(two.port)
        async with running_gateway(one, two) as running:
            refused = await running.post(chat(), headers={"x-kvroute-pin": one.name})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "pin_refused")


async def test_a_replica_that_serves_other_models_is_no_reason_to_try_again() -> None:
    script = script_of(responding)
    async with scripted(script, script) as (one, two):
        two.models = ["other"]
        async with running_gateway(one, two, allow_pin=True) as running:
            refused = await running.post(chat(), headers={"x-kvroute-pin": two.name})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "model")
            assert f"{two.name!r}, which serves 'other' only" in error["message"]
            await running.post(b'{"model":"other","input":"x"}', path="/v1/responses")
            follow = b'{"model":"sim","input":"y","previous_response_id":"resp_abc1"}'
            refused = await running.post(follow, path="/v1/responses")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
            assert "retry-after" not in refused.headers
            assert (one.seen, len(two.seen)) == ([], 1)


def responding(seen: Seen) -> bytes:
    return json_answer({"id": "resp_abc1", "object": "response", "at": seen.target})


async def test_a_response_goes_back_to_the_replica_that_made_it() -> None:
    script = script_of(responding)
    async with scripted(script, script, script) as replicas:
        async with running_gateway(*replicas) as running:
            body = b'{"model":"sim","input":"x"}'
            made = await running.post(body, path="/v1/responses")
            owner = made.headers["x-kvroute-replica"]
            follow = b'{"model":"sim","input":"y","previous_response_id":"resp_abc1"}'
            for _ in range(4):
                answer = await running.post(follow, path="/v1/responses")
                assert answer.headers["x-kvroute-replica"] == owner
                cancelled = await running.post(b"", path="/v1/responses/resp_abc1/cancel")
                assert cancelled.headers["x-kvroute-replica"] == owner
                assert cancelled.json()["at"] == "/v1/responses/resp_abc1/cancel"
            deleted = await running.client.delete("/v1/responses/resp_abc1")
            assert deleted.headers["x-kvroute-replica"] == owner
            unknown = b'{"model":"sim","input":"y","previous_response_id":"resp_other"}'
            gone = await running.post(unknown, path="/v1/responses")
            assert gone.status_code == 404
            assert "'resp_other' cannot be found" in gone.json()["error"]["message"]
            assert gone.json()["error"]["param"] == "previous_response_id"
            assert (await running.client.get("/v1/responses/resp_other")).status_code == 404


async def test_a_streamed_response_is_remembered_from_its_first_event() -> None:
    async def stream(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        event = b'event: response.created\ndata: {"response":{"id":"resp_s1"}}\n\n'
        writer.write(SSE_HEAD + chunk(event) + b"0\r\n\r\n")

    async with scripted(stream, stream, stream) as replicas:
        async with running_gateway(*replicas) as running:
            body = b'{"model":"sim","input":"x","stream":true}'
            owner = (await running.post(body, path="/v1/responses")).headers["x-kvroute-replica"]
            for _ in range(4):
                answer = await running.post(b"", path="/v1/responses/resp_s1/cancel")
                assert answer.headers["x-kvroute-replica"] == owner


async def test_an_owner_that_left_the_fleet_is_a_clear_404() -> None:
    async with scripted(script_of(responding), answer_ok) as replicas:
        async with running_gateway(*replicas) as running:
            await running.post(b'{"model":"sim","input":"x"}', path="/v1/responses")
            del running.gateway.fleet.replicas[replicas[0].name]
            gone = await running.client.get("/v1/responses/resp_abc1")
            assert gone.status_code == 404
            # With one replica left nobody else could have it; the replica says so itself.
            assert gone.json() == {"detail": "Not Found"} or "gone" in gone.text


async def test_files_and_batches_stay_together() -> None:
    def store(seen: Seen) -> bytes:
        if seen.target == "/v1/files":
            return json_answer({"id": "file-9", "object": "file"})
        return json_answer({"id": "batch_9", "object": "batch"})

    script = script_of(store)
    async with scripted(script, script, script) as replicas:
        async with running_gateway(*replicas) as running:
            form = {"file": ("in.jsonl", b"{}\n" * 1000)}
            made = await running.client.post("/v1/files", files=form, data={"purpose": "batch"})
            owner = made.headers["x-kvroute-replica"]
            for _ in range(3):
                batch = await running.client.post("/v1/batches", json={"input_file_id": "file-9"})
                assert batch.headers["x-kvroute-replica"] == owner
                ended = await running.post(b"", path="/v1/batches/batch_9/cancel")
                assert ended.headers["x-kvroute-replica"] == owner
            lost = await running.client.post("/v1/batches", json={"input_file_id": "file-0"})
            assert lost.status_code == 404


@pytest.mark.parametrize("model_first", [True, False])
async def test_forms_are_streamed_through_unchanged(model_first: bool) -> None:
    audio = bytes(range(256)) * 4000
    async with scripted(answer_ok, answer_ok) as (one, two):
        one.models, two.models = ["other"], ["whisper"]
        async with running_gateway(one, two) as running:
            file = (
                b'--xx\r\ncontent-disposition: form-data; name="file"; filename="model"\r\n\r\n'
                + audio
                + b"\r\n"
            )
            field = b'--xx\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
            parts = [field, file] if model_first else [file, field]
            body = b"".join(parts) + b"--xx--\r\n"
            answer = await running.post(
                body,
                path="/v1/audio/transcriptions",
                headers={"content-type": "multipart/form-data; boundary=xx"},
            )
            assert answer.status_code == 200
            (seen,) = two.seen
            assert seen.body == body and one.seen == []
            assert seen.header("content-length") == str(len(body))


async def test_a_form_of_unknown_length_is_sent_on_in_chunks() -> None:
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        field = b'--xx\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n'
        rest = [b"--xx\r\n" + b"y" * 70_000, b"z" * 70_000 + b"--xx--\r\n"]

        async def parts():
            yield field
            for part in rest:
                await asyncio.sleep(0.02)
                yield part

        answer = await running.client.post(
            "/v1/audio/transcriptions",
            content=parts(),
            headers={"content-type": 'multipart/form-data; boundary="xx"'},
        )
        assert answer.status_code == 200
        (seen,) = replica.seen
        assert seen.body == field + b"".join(rest)


@pytest.mark.parametrize(
    ("content_type", "body", "says"),
    [
        ("application/json", b"{}", "multipart/form-data"),
        ("multipart/form-data; boundary=xx", b"--xx--\r\n", "`model` is required"),
        (
            "multipart/form-data; boundary=xx",
            b'--xx\r\nContent-Disposition: form-data; name="model"\r\n\r\nnope\r\n--xx--\r\n',
            "'nope' is not served",
        ),
    ],
)
async def test_bad_forms_are_refused(content_type: str, body: bytes, says: str) -> None:
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        answer = await running.post(
            body, path="/v1/audio/transcriptions", headers={"content-type": content_type}
        )
        assert answer.status_code in (400, 404) and says in answer.json()["error"]["message"]
        assert replica.seen == []


async def test_a_request_may_shorten_its_deadline() -> None:
    async def silent(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.read(1)

    async with scripted(silent) as (replica,), running_gateway(replica) as running:
        late = await running.post(chat(), headers={"x-request-timeout": "0.1"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "replica_timeout")
        assert "x-request-timeout" in late.json()["error"]["message"]
        for wrong in ("0", "-1", "soon", "nan", "inf"):
            refused = await running.post(chat(), headers={"x-request-timeout": wrong})
            assert refused.status_code == 400
        await running.becomes_idle()


@pytest.mark.parametrize("setting", ["request_timeout_s", "idle_timeout_s"])
async def test_a_stream_past_its_deadline_ends_in_an_error_event(setting: str) -> None:
    async def stall(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
        await reader.read(1)

    async with scripted(stall) as (replica,):
        async with running_gateway(replica, **{setting: 0.15}) as running:
            received = b""
            with pytest.raises(httpx.RemoteProtocolError):
                async with running.client.stream(
                    "POST", "/v1/chat/completions", content=chat(stream=True)
                ) as answer:
                    async for data in answer.aiter_bytes():
                        received += data
            assert received.startswith(b"data: 1\n\nevent: error\ndata: {")
            json.loads(received.rpartition(b"data: ")[2])
            await running.becomes_idle()


async def test_answered_retries_are_bounded_by_the_budget() -> None:
    async def busy(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({}, "503 Service Unavailable"))

    async with scripted(busy, busy) as replicas:
        async with running_gateway(*replicas, retry_budget=0.1) as running:
            for _ in range(60):
                assert (await running.post(chat())).status_code == 503
            sent = sum(len(replica.seen) for replica in replicas)
            # 60 requests, a reserve of ten retries and a tenth of the requests more.
            assert 60 + 10 <= sent <= 60 + 10 + 6


async def test_statuses_to_retry_are_a_setting() -> None:
    async def limited(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(json_answer({}, "429 Too Many Requests"))

    async with scripted(limited, answer_ok) as replicas:
        async with running_gateway(*replicas, retry_statuses=[429]) as running:
            assert [(await running.post(chat())).status_code for _ in range(4)] == [200] * 4
        async with running_gateway(*replicas) as running:
            statuses = sorted([(await running.post(chat())).status_code for _ in range(4)])
            assert statuses == [200, 200, 429, 429]


async def test_what_must_not_be_repeated_is_not() -> None:
    async def hang_up(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.transport.abort()

    async with scripted(hang_up, hang_up) as replicas:
        async with running_gateway(*replicas) as running:
            answer = await running.client.post("/v1/unknown", json={"a": 1})
            assert answer.status_code == 503
            assert sum(len(replica.seen) for replica in replicas) == 1
            running.gateway.fleet.replicas[replicas[0].name].failed("test")
            down = ScriptedReplica()
            await down.start()
            await down.stop()


async def test_a_connection_that_fails_is_repeated_for_every_kind() -> None:
    dead = ScriptedReplica()
    await dead.start()
    async with scripted(answer_ok) as (alive,):
        async with running_gateway(dead, alive, probe_interval_s=30) as running:
            await dead.stop()
            for _ in range(3):
                answer = await running.client.post("/v1/unknown", json={"a": 1})
                assert answer.headers["x-kvroute-replica"] == alive.name


async def test_sampled_roots_differ_by_salt_in_the_lookup() -> None:
    index = TaughtIndex()
    async with scripted(answer_ok) as (replica,):
        index.holds = lambda root, hashes: {Holder(replica.name, 0, "device"): 1}
        async with running_gateway(replica, index=index) as running:
            for salt in ("", "a", "b", "a"):
                body = {"model": "sim", "prompt": list(range(64)), "cache_salt": salt}
                await running.client.post("/v1/completions", json=body)
            roots = [root for root, _ in index.asked]
            assert roots[1] == roots[3] and len(set(roots)) == 3


async def test_a_replica_that_falls_silent_and_fails_its_probes_is_not_waited_for() -> None:
    async def silent(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        stuck.health = "503 Service Unavailable"
        await reader.read(1)

    async with scripted(silent, answer_ok) as (stuck, well):
        async with running_gateway(stuck, well) as running:
            answers = [await running.post(chat()) for _ in range(2)]
            assert [each.headers["x-kvroute-replica"] for each in answers] == [well.name] * 2
            assert len(stuck.seen) == 1
            await running.becomes_idle()


async def test_a_response_has_its_first_token_with_its_first_delta() -> None:
    created, go_on = asyncio.Event(), asyncio.Event()

    async def stream(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(SSE_HEAD + chunk(b'event: response.created\ndata: {"response":{}}\n\n'))
        await writer.drain()
        created.set()
        await go_on.wait()
        writer.write(chunk(b'event: response.output_text.delta\ndata: {"delta":"x"}\n\n'))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(b"0\r\n\r\n")

    async with scripted(stream) as (replica,), running_gateway(replica) as running:
        body = b'{"model":"sim","input":"x","stream":true}'
        asked = asyncio.create_task(running.post(body, path="/v1/responses"))
        async with asyncio.timeout(5):
            await created.wait()
            load = running.gateway.load.rank(replica.name, 0)
            while not running.gateway.relay.inflight:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            assert load.queued_tokens > 0
            go_on.set()
            while load.queued_tokens:
                await asyncio.sleep(0.001)
            assert load.running == 1
        assert (await asked).status_code == 200
        metrics = (await running.client.get("/metrics")).text
        name = f'kvroute_ttft_seconds_count{{replica="{replica.name}"}}'
        assert f"{name} 1.0" in metrics


@pytest.mark.parametrize("status", [b"099", b"600", b"999"])
async def test_a_status_that_is_none_is_an_error_of_ours(status: bytes) -> None:
    async def odd(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %b Odd\r\ncontent-length: 2\r\n\r\nok" % status)

    async with scripted(odd) as (replica,), running_gateway(replica, allow_pin=True) as running:
        answer = await running.post(chat(), headers={"x-kvroute-pin": replica.name})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert "status" in answer.json()["error"]["message"]


async def test_trailers_are_no_headers_and_large_headers_are_refused() -> None:
    async def trailing(
        seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if b"large" in seen.body:
            writer.write(json_answer({}, extra=f"x-large: {'a' * 100_000}\r\n"))
        else:
            head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
            writer.write(head + chunk(b"ok") + b"0\r\nx-t: trailer\r\n\r\n")

    async with scripted(trailing) as (replica,), running_gateway(replica) as running:
        answer = await running.post(chat())
        assert (answer.text, "x-t" in answer.headers) == ("ok", False)
        refused = await running.post(chat(user="large"))
        assert refused.status_code == 503 and "too large" in refused.json()["error"]["message"]


async def test_a_reported_number_that_is_none_breaks_no_answer() -> None:
    text = b'{"usage":{"prompt_tokens_details":{"cached_tokens": ' + b"9" * 6000 + b"}}}"

    async def huge(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text) + text)

    async with scripted(huge) as (replica,), running_gateway(replica) as running:
        body = json.dumps({"model": "sim", "prompt": list(range(64))}).encode()
        assert (await running.post(body, path="/v1/completions")).content == text


async def test_names_that_cannot_be_are_4xx() -> None:
    async with scripted(answer_ok, answer_ok) as replicas:
        async with running_gateway(*replicas, allow_pin=True) as running:
            name = replicas[0].name.encode()
            for pin in (name + b"/\xb2", name + b"/" + b"9" * 5000):
                answer = await running.post(chat(), headers={b"x-kvroute-pin": pin})
                assert answer.status_code == 400
            for path, field in (("/v1/responses", "previous_response_id"),):
                body = b'{"model":"sim","input":"x","%b":"\\ud800"}' % field.encode()
                assert (await running.post(body, path=path)).status_code == 404
            for path in ("/v1/../reset_prefix_cache", "/v1/%2e%2e/sleep", "/v1/./x"):
                reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
                writer.write(
                    f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode()
                )
                assert (await reader.readline()).startswith(b"HTTP/1.1 400")
                writer.close()
            assert all(not replica.seen for replica in replicas)


async def test_a_trailing_slash_is_the_same_route() -> None:
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        assert (await running.post(b"{", path="/v1/chat/completions/")).status_code == 400
        assert (await running.post(chat(), path="/v1/chat/completions/")).status_code == 200


async def test_a_long_prompt_holds_nobody_up() -> None:
    tokenizer = default_folder()
    async with scripted(answer_ok) as (replica,):
        async with running_gateway(replica, tokenizer=tokenizer) as running:
            words = " ".join(f"{number * 7919:x}" for number in range(250_000))
            asked = asyncio.create_task(running.post(chat(user="x", note=words)))
            long = {"messages": [{"role": "user", "content": words}]}
            asked = asyncio.create_task(running.post(chat(**long)))
            slowest = 0.0
            while not asked.done():
                before = asyncio.get_running_loop().time()
                await asyncio.sleep(0.001)
                slowest = max(slowest, asyncio.get_running_loop().time() - before)
            assert (await asked).status_code == 200
            metrics = (await running.client.get("/metrics")).text
            assert 'kvroute_prompts_total{source="none"} 1.0' in metrics
            # Tokenizing it takes over a second; parsing and sending it are what is left.
            assert slowest < 0.5


@pytest.mark.parametrize(("numbers", "source"), [(1_000, "given"), (5_000_000, "none")])
async def test_token_ids_that_no_engine_takes_are_not_hashed(numbers: int, source: str) -> None:
    body = b'{"model":"sim","prompt":[' + b"1," * numbers + b"1]}"
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        assert (await running.post(body, path="/v1/completions")).status_code == 200
        assert replica.seen[0].body == body
        metrics = (await running.client.get("/metrics")).text
        assert f'kvroute_prompts_total{{source="{source}"}} 1.0' in metrics
