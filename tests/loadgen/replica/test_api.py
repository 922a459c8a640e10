import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from tests.loadgen.replica.conftest import StartFleet

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LONG = "The scheduler keeps what it has and asks for the rest. " * 12


def chat(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    return {
        "model": "sim-model",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        **fields,
    }


async def post(client: httpx.AsyncClient, path: str, body: Any, **headers: str) -> Any:
    response = await client.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """Chunks of a stream; its last line must be [DONE]."""
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def cached(answer: Any) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def metrics(client: httpx.AsyncClient) -> dict[tuple[str, str, str], float]:
    """(name, engine, source or reason) -> value."""
    text = (await client.get("/metrics")).text
    return {
        (
            sample.name,
            sample.labels.get("engine", ""),
            sample.labels.get("source", sample.labels.get("finished_reason", "")),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "bucket" not in sample.name
    }


async def test_second_request_hits_whole_blocks(client: httpx.AsyncClient) -> None:
    first, second = [await post(client, CHAT, chat(LONG)) for _ in range(2)]
    tokens = first["usage"]["prompt_tokens"]
    assert cached(first) == 0
    assert cached(second) == (tokens - 1) // 16 * 16
    assert first["choices"] == second["choices"]
    assert first["usage"]["completion_tokens"] == 8


async def test_next_turn_hits_the_generated_blocks(client: httpx.AsyncClient) -> None:
    first = await post(client, CHAT, chat(LONG, max_tokens=60))
    turns = [
        *chat(LONG)["messages"],
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "And then?"},
    ]
    second = await post(client, CHAT, chat(messages=turns))
    # The last token's KV is never computed, and its word may be cut.
    assert cached(second) >= first["usage"]["total_tokens"] - 16 - 8


async def test_salts_and_adapters_isolate(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(adapters=("tuned",))
    async with httpx.AsyncClient(base_url=fleet.replicas[0].url) as client:
        seen = {}
        for salt, model in ((None, "sim-model"), ("a", "sim-model"), (None, "tuned")):
            for turn in "first", "second":
                answer = await post(client, CHAT, chat(LONG, cache_salt=salt, model=model))
                seen[salt, model, turn] = cached(answer)
                assert answer["model"] == model
        assert all((hit > 0) == (key[2] == "second") for key, hit in seen.items())
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("sim-model", None),
            ("tuned", "sim-model"),
        ]


async def test_order_of_chat_chunks(client: httpx.AsyncClient) -> None:
    whole = await post(client, CHAT, chat())
    chunks = await stream(client, CHAT, chat(stream_options={"include_usage": True}))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    middle = chunks[1:-1]
    assert [chunk["choices"][0]["finish_reason"] for chunk in middle] == [None] * 7 + ["length"]
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle)
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks[:-1])


async def test_usage_in_every_chunk_when_asked(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(client, CHAT, chat(stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[1:] == [*range(1, 9), 8]


async def test_streams_without_options_have_no_usage(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, COMPLETIONS, {"prompt": "Once", "max_tokens": 3})
    assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 1]
    assert all("usage" not in chunk for chunk in chunks)


async def test_token_ids_are_those_of_tokenize(client: httpx.AsyncClient) -> None:
    body = chat(return_token_ids=True)
    ids = (await post(client, "/tokenize", {"messages": body["messages"]}))["tokens"]
    rendered = await post(client, CHAT + "/render", body)
    whole = await post(client, CHAT, body)
    chunks = await stream(client, CHAT, body)
    assert rendered["token_ids"] == whole["prompt_token_ids"] == ids
    assert chunks[0]["prompt_token_ids"] == ids
    reply = [token for chunk in chunks[1:] for token in chunk["choices"][0]["token_ids"]]
    assert reply == whole["choices"][0]["token_ids"]
    text = (await post(client, "/detokenize", {"tokens": reply}))["prompt"]
    assert text == whole["choices"][0]["message"]["content"]


async def test_completion_prompts_of_every_form(client: httpx.AsyncClient) -> None:
    one = (await post(client, "/tokenize", {"prompt": "Once upon"}))["tokens"]
    two = (await post(client, "/tokenize", {"prompt": "A time"}))["tokens"]
    forms = ["Once upon", ["Once upon", "A time"], one, [one, two]]
    answers = [
        await post(client, COMPLETIONS, {"prompt": form, "max_tokens": 4, "return_token_ids": True})
        for form in forms
    ]
    single, double, ids, lists = answers
    assert single["choices"] == ids["choices"]
    assert double["choices"] == lists["choices"]
    assert [choice["prompt_token_ids"] for choice in double["choices"]] == [one, two]
    assert double["usage"]["prompt_tokens"] == len(one) + len(two)
    rendered = await post(client, COMPLETIONS + "/render", {"prompt": forms[1]})
    assert [part["token_ids"] for part in rendered] == [one, two]


async def test_a_prompt_counts_once_however_many_samples_it_has(
    client: httpx.AsyncClient,
) -> None:
    await post(client, CHAT, chat(LONG))
    answer = await post(client, CHAT, chat(LONG, n=3))
    assert cached(answer) == (answer["usage"]["prompt_tokens"] - 1) // 16 * 16


async def test_replies_go_on_from_text_and_open_after_a_break(
    client: httpx.AsyncClient,
) -> None:
    opened = await post(client, CHAT, chat())
    assert opened["choices"][0]["message"]["content"][0].isupper()
    continued = await post(client, COMPLETIONS, {"prompt": "Once"})
    assert continued["choices"][0]["text"].startswith(" ")


async def test_samples_of_one_prompt(client: httpx.AsyncClient) -> None:
    answer = await post(client, CHAT, chat(n=3))
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) == 3
    assert answer["usage"]["completion_tokens"] == 24
    chunks = await stream(client, CHAT, chat(n=3))
    for index, text in enumerate(texts):
        deltas = [
            choice["delta"]["content"]
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["index"] == index
        ]
        assert "".join(deltas) == text


@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings_cut_the_text(client: httpx.AsyncClient, include: bool) -> None:
    whole = await post(client, CHAT, chat(max_tokens=40))
    text = whole["choices"][0]["message"]["content"]
    stop = text[20:25]
    body = chat(max_tokens=40, stop=["never there", stop], include_stop_str_in_output=include)
    cut = await post(client, CHAT, body)
    expected = text[: text.index(stop) + (len(stop) if include else 0)]
    assert cut["choices"][0]["message"]["content"] == expected
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["choices"][0]["stop_reason"] == stop
    assert cut["usage"]["completion_tokens"] < 40
    chunks = await stream(client, CHAT, body)
    deltas = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert "".join(deltas) == expected


async def test_stop_tokens_end_the_reply(client: httpx.AsyncClient) -> None:
    body = chat(max_tokens=40, return_token_ids=True)
    ids = (await post(client, CHAT, body))["choices"][0]["token_ids"]
    stop = ids[5]
    choice = (await post(client, CHAT, {**body, "stop_token_ids": [stop]}))["choices"][0]
    assert choice["token_ids"] == ids[: ids.index(stop) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_a_reply_without_limit_ends_by_itself(client: httpx.AsyncClient) -> None:
    body = chat()
    del body["max_tokens"]
    answer = await post(client, CHAT, body)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "<|im_end|>" not in answer["choices"][0]["message"]["content"]


async def test_logprobs_of_both_endpoints(client: httpx.AsyncClient) -> None:
    answer = await post(client, CHAT, chat(logprobs=True, top_logprobs=3))
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    for entry in content:
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] < 0
    text = b"".join(bytes(entry["bytes"]) for entry in content).decode()
    assert text == answer["choices"][0]["message"]["content"]
    whole = await post(client, COMPLETIONS, {"prompt": "Once", "max_tokens": 5, "logprobs": 2})
    logprobs = whole["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == whole["choices"][0]["text"]
    assert logprobs["text_offset"][0] == 0
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 5


async def test_echo_repeats_the_prompt(client: httpx.AsyncClient) -> None:
    body = {"prompt": "Once upon", "max_tokens": 3, "echo": True}
    whole = (await post(client, COMPLETIONS, body))["choices"][0]["text"]
    chunks = await stream(client, COMPLETIONS, body)
    assert whole.startswith("Once upon")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


async def test_ids_come_from_header_or_body(client: httpx.AsyncClient) -> None:
    named = await post(client, CHAT, chat(request_id="body"))
    assert named["id"] == "chatcmpl-body"
    named = await post(client, CHAT, chat(request_id="body"), **{"X-Request-Id": "head"})
    assert named["id"] == "chatcmpl-head"
    named = await post(client, COMPLETIONS, {"prompt": "a", "request_id": "x"})
    assert named["id"] == "cmpl-x"


async def test_tools_become_part_of_the_prompt(client: httpx.AsyncClient) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    plain = await post(client, CHAT, chat())
    tooled = await post(client, CHAT, chat(tools=[tool], tool_choice="auto"))
    assert tooled["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]


async def test_content_parts_are_joined(client: httpx.AsyncClient) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "user", "content": parts}]
    joined = await post(client, "/tokenize", {"messages": messages})
    plain = await post(client, "/tokenize", {"messages": chat("Hel\nlo")["messages"]})
    assert joined["tokens"] == plain["tokens"]


FIRST_KIND = "body.messages.0.ChatCompletionDeveloperMessageParam"
REFUSALS = [
    (CHAT, b"{", 400, "body.1"),
    (CHAT, b"[]", 400, "body"),
    (CHAT, b"", 400, "body"),
    (CHAT, chat(model="other"), 404, "model"),
    (CHAT, chat(messages="Hi"), 400, "body.messages"),
    (CHAT, {"model": "sim-model"}, 400, "body.messages"),
    (CHAT, chat(messages=[]), 400, None),
    (CHAT, chat(messages=[{"content": "x"}]), 400, f"{FIRST_KIND}.role"),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, f"{FIRST_KIND}.content"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, None),
    (CHAT, chat(max_tokens="many"), 400, "body.max_tokens"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice"),
    (CHAT, chat(response_format={"type": "x"}), 400, "body.response_format.type"),
    (CHAT, chat(cache_salt="a/b"), 400, "cache_salt"),
    (CHAT, chat(n=2, temperature=0), 400, None),
    (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    (CHAT, chat(max_tokens=10**6), 400, "max_tokens"),
    (CHAT, chat(cache_salt=""), 400, "cache_salt"),
    (CHAT, chat(temperature=-1), 400, "temperature"),
    (CHAT, chat(n=0), 400, None),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options"),
    (CHAT, chat("word " * 9000), 400, "input_tokens"),
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 1]}, 400, "body.prompt.0"),
    (COMPLETIONS, {"prompt": [10**6]}, 400, None),
    (COMPLETIONS, {"prompt": "a", "logprobs": 99}, 400, "logprobs"),
    ("/tokenize", {}, 400, "body.prompt"),
    ("/detokenize", {"tokens": [-1]}, 400, "body.tokens.0"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), REFUSALS)
async def test_refusals_have_the_shape_clients_know(
    client: httpx.AsyncClient, path: str, body: Any, status: int, param: str | None
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    response = await client.post(path, content=content, headers=headers)
    error = response.json()["error"]
    assert response.status_code == error["code"] == status
    assert error["param"] == param
    assert error["message"]
    assert (await client.get("/load")).json() == {"server_load": 0}


async def test_what_no_route_answers(client: httpx.AsyncClient) -> None:
    """In FastAPI's words, also where vLLM has its own for all else."""
    nowhere = await client.post("/v1/nothing", json={})
    assert (nowhere.status_code, nowhere.json()) == (404, {"detail": "Not Found"})
    wrong = await client.post("/health", json={})
    assert (wrong.status_code, wrong.json()) == (405, {"detail": "Method Not Allowed"})
    assert wrong.headers["allow"] == "GET"


async def test_a_longer_reply_than_there_is_room_for_ends_with_the_context(
    client: httpx.AsyncClient,
) -> None:
    body = {"prompt": "word " * 8000, "max_tokens": 8192, "ignore_eos": True}
    answer = await post(client, COMPLETIONS, body)
    assert answer["usage"]["total_tokens"] == 8192
    assert answer["choices"][0]["finish_reason"] == "length"


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "maxLength": 3}, "days": {"type": "integer"}},
        },
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("choice", "reason"), [(NAMED, "stop"), ("required", "tool_calls")], ids=["named", "required"]
)
async def test_a_tool_that_must_be_called_is_called(
    client: httpx.AsyncClient, choice: Any, reason: str
) -> None:
    whole = await post(client, CHAT, chat(tools=[TOOL], tool_choice=choice, max_tokens=40))
    (said,) = whole["choices"]
    (call,) = said["message"]["tool_calls"]
    assert (said["message"]["content"], said["finish_reason"]) == ("", reason)
    assert json.loads(call["function"]["arguments"]) == {"town": "cac", "days": 1}
    chunks = await stream(client, CHAT, chat(tools=[TOOL], tool_choice=choice, max_tokens=40))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    parts = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert parts[0] == {"name": "weather"}
    assert "".join(part["arguments"] for part in parts[1:]) == call["function"]["arguments"]


async def test_a_tool_that_may_be_called_is_not(client: httpx.AsyncClient) -> None:
    answer = await post(client, CHAT, chat(tools=[TOOL]))
    assert "tool_calls" not in answer["choices"][0]["message"]


async def test_a_schema_is_kept(client: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}, "b": {"type": "array"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    answer = await post(client, CHAT, chat(response_format=wanted, max_tokens=40))
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": "x", "b": []}


async def test_of_several_prompts_one_counts_as_cached(client: httpx.AsyncClient) -> None:
    """Of the last in a whole answer, of the first that answers in a stream, as in vLLM."""
    ids = list(range(100, 180))
    await post(client, COMPLETIONS, {"prompt": ids, "max_tokens": 1})
    both = {"prompt": [ids, [1, 2, 3]], "max_tokens": 1}
    whole = await post(client, COMPLETIONS, both)
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    usage = {"stream_options": {"include_usage": True}}
    chunks = await stream(client, COMPLETIONS, {**both, **usage})
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


async def test_what_entered_the_cache_is_told(client: httpx.AsyncClient) -> None:
    """Whole blocks of the prompt that were not there before."""
    first = await post(client, CHAT, chat("A prompt to be cached. " * 20))
    again = await post(client, CHAT, chat("A prompt to be cached. " * 20))
    details = [each["usage"]["prompt_tokens_details"] for each in (first, again)]
    whole = first["usage"]["prompt_tokens"] // 16 * 16
    assert details[0]["created_cache_tokens"] == whole
    assert details[1]["created_cache_tokens"] == whole - details[1]["cached_tokens"] <= 16


async def test_a_body_must_say_that_it_is_json(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, content=json.dumps(chat()))
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


async def test_numbers_in_strings_and_unknown_fields_are_accepted(
    client: httpx.AsyncClient,
) -> None:
    answer = await post(client, CHAT, chat(max_tokens="3", whatever={"a": 1}))
    assert answer["usage"]["completion_tokens"] == 3


async def test_prompts_of_exactly_the_limit(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(max_model_len_tokens=64)
    async with httpx.AsyncClient(base_url=fleet.replicas[0].url) as client:
        full = await client.post(COMPLETIONS, json={"prompt": [5] * 64})
        assert full.status_code == 400
        assert full.json()["error"]["message"].startswith("max_tokens must be at least 1, got 0")
        fits = await post(client, COMPLETIONS, {"prompt": [5] * 63, "max_tokens": 1})
        assert fits["usage"]["total_tokens"] == 64
        assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] == 64


async def test_metrics_follow_the_requests(client: httpx.AsyncClient) -> None:
    answers = [await post(client, CHAT, chat(LONG)) for _ in range(2)]
    seen = await metrics(client)
    prompt = sum(answer["usage"]["prompt_tokens"] for answer in answers)
    hit = cached(answers[1])
    assert seen["vllm:prompt_tokens_total", "0", ""] == prompt
    assert seen["vllm:prefix_cache_queries_total", "0", ""] == prompt
    assert seen["vllm:prefix_cache_hits_total", "0", ""] == hit
    source = "vllm:prompt_tokens_by_source_total"
    assert seen[source, "0", "local_cache_hit"] == hit
    assert seen[source, "0", "local_compute"] == prompt - hit
    assert seen["vllm:generation_tokens_total", "0", ""] == 16
    assert seen["vllm:time_to_first_token_seconds_count", "0", ""] == 2
    assert seen["vllm:request_success_total", "0", "length"] == 2
    assert seen["vllm:num_requests_running", "0", ""] == 0
    text = (await client.get("/metrics")).text
    assert 'block_size="16"' in text
    assert 'num_gpu_blocks="512"' in text


async def test_small_endpoints(client: httpx.AsyncClient) -> None:
    for path in "/health", "/ping":
        response = await client.get(path)
        assert (response.status_code, response.content) == (200, b"")
    assert set((await client.get("/version")).json()) == {"version"}


async def test_ranks_are_chosen_by_header_and_have_their_own_cache(
    start_fleet: StartFleet,
) -> None:
    fleet = await start_fleet(ranks=2)
    async with httpx.AsyncClient(base_url=fleet.replicas[0].url) as client:
        rank = {"X-data-parallel-rank": "1"}
        assert [cached(await post(client, CHAT, chat(LONG), **rank)) > 0 for _ in range(2)] == [
            False,
            True,
        ]
        other = {"X-data-parallel-rank": "0"}
        assert cached(await post(client, CHAT, chat(LONG), **other)) == 0
        seen = await metrics(client)
        assert seen["vllm:request_success_total", "1", "length"] == 2
        assert seen["vllm:request_success_total", "0", "length"] == 1
        refused = await client.post(CHAT, json=chat(), headers={"X-data-parallel-rank": "2"})
        assert refused.status_code == 400


async def test_without_a_rank_the_least_loaded_one_serves(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(ranks=2, decode_step_s=0.005)
    async with httpx.AsyncClient(base_url=fleet.replicas[0].url) as client:
        await asyncio.gather(*(post(client, CHAT, chat(max_tokens=20)) for _ in range(6)))
        seen = await metrics(client)
    counts = [seen["vllm:request_success_total", str(rank), "length"] for rank in range(2)]
    assert counts == [3, 3]


async def test_kv_events_of_a_served_request(start_fleet: StartFleet) -> None:
    fleet = await start_fleet()
    replica = fleet.replicas[0]
    context = zmq.asyncio.Context()
    replay = context.socket(zmq.DEALER)
    async with httpx.AsyncClient(base_url=replica.url) as client:
        sources = (await client.get("/kv_event_sources")).json()
        await post(client, CHAT, chat(LONG, cache_salt="t"))
        reset = await client.post("/reset_prefix_cache")
        assert reset.status_code == 200
        assert cached(await post(client, CHAT, chat(LONG, cache_salt="t"))) == 0
        ids = (await post(client, "/tokenize", {"messages": chat(LONG)["messages"]}))["tokens"]
    assert set(sources) == {"0"}
    assert replica.describe()["replay"][0] == sources["0"]["replay_endpoint"].replace(
        "*", "127.0.0.1"
    )
    replay.connect(sources["0"]["replay_endpoint"].replace("*", "127.0.0.1"))
    await replay.send_multipart([b"", (0).to_bytes(8, "big")])
    batches = []
    async with asyncio.timeout(5):
        while (frames := await replay.recv_multipart())[-1]:
            batches.append(frames)
    context.destroy(linger=0)
    events = [event for frames in batches for event in msgspec.msgpack.decode(frames[-1])[1]]
    kinds = [event["type"] for event in events]
    assert "AllBlocksCleared" in kinds
    stored = events[0]
    assert stored["token_ids"] == ids[: len(ids) // 16 * 16]
    assert stored["extra_keys"][0] == ["t"]
    assert [int.from_bytes(frames[-2], "big") for frames in batches] == list(range(len(batches)))
