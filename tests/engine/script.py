"""The requests that a real and a simulated replica both get, in this order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.engine.gateway import prose

JSON = Mapping[str, Any]
TEXT = "The quick brown fox jumps over the lazy dog."
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a town",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "maxLength": 4}},
            "required": ["town"],
        },
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


@dataclass(frozen=True)
class Step:
    """One request. A `body` that is bytes is sent as it is, anything else as JSON."""

    name: str
    path: str
    body: object = None
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)

    def content(self) -> bytes | None:
        if self.body is None or isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body).encode()


def script(model: str) -> list[Step]:
    """Every step; the earlier ones decide what the later ones find cached."""
    parts = (chats, completions, messages, responses, tokens, pooling, state)
    return [step for part in parts for step in part(model)]


def said(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def chats(model: str) -> Iterator[Step]:
    base = {"model": model, "messages": said("Hello"), "max_tokens": 3, "temperature": 0}
    # Whatever the model would say: it must not stop by itself.
    base |= {"ignore_eos": True}

    def chat(name: str, **fields: Any) -> Step:
        return Step(f"chat {name}", CHAT, {**base, **fields})

    def without(name: str, field: str) -> Step:
        return Step(f"chat {name}", CHAT, {k: v for k, v in base.items() if k != field})

    long = [{"role": "system", "content": prose("the fidelity of a replica", 20)}, *said("Go.")]
    usage = {"include_usage": True}
    yield chat("plain")
    yield chat("long, cold", messages=long)
    yield chat("long, warm", messages=long)
    yield chat("salted, cold", messages=long, cache_salt="a")
    yield chat("salted, warm", messages=long, cache_salt="a")
    yield chat("stream", stream=True)
    yield chat("stream with usage", stream=True, stream_options=usage)
    every = {**usage, "continuous_usage_stats": True}
    yield chat("stream with usage in every chunk", stream=True, stream_options=every)
    yield chat("stream of n=2", stream=True, n=2, temperature=1, seed=1, stream_options=usage)
    yield chat("n=2", n=2, temperature=1, seed=1)
    yield chat("n=2, warm", n=2, temperature=1, seed=1, messages=long)
    yield chat("logprobs", logprobs=True, top_logprobs=2)
    yield chat("logprobs without top", logprobs=True)
    yield chat("stream with logprobs", logprobs=True, top_logprobs=1, stream=True)
    yield chat("token ids", return_token_ids=True)
    yield chat("stream with token ids", return_token_ids=True, stream=True)
    yield chat("prompt logprobs", prompt_logprobs=1)
    yield chat("max_completion_tokens", max_completion_tokens=2)
    yield chat("stop token", stop_token_ids=list(range(49152)))
    yield chat("parts", messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]
    yield chat("several parts", messages=[{"role": "user", "content": parts}])
    yield chat("several turns", messages=said("Hello", "Hi.", "And?"))
    yield chat("unknown field", x_unknown=1)
    yield chat("tools, none", tools=[TOOL], tool_choice="none")
    yield chat("tools, auto", tools=[TOOL])
    yield chat("tools, auto, stream", tools=[TOOL], stream=True)
    forced = {"tools": [TOOL], "ignore_eos": False, "max_tokens": 60}
    yield chat("tools, named", **forced, tool_choice=NAMED)
    yield chat("tools, named, stream", **forced, tool_choice=NAMED, stream=True)
    yield chat("tools, required", **forced, tool_choice="required")
    yield chat("tools, required, stream", **forced, tool_choice="required", stream=True)
    yield chat("tool choice without tools", tool_choice="required")
    yield chat(
        "tool choice of an unknown tool",
        tools=[TOOL],
        tool_choice={**NAMED, "function": {"name": "x"}},
    )
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    yield chat("response format", response_format=schema, ignore_eos=False, max_tokens=20)
    yield chat("bad response format", response_format={"type": "x"})
    yield chat("request id", request_id="given")
    yield Step("chat request id header", CHAT, base, headers={"x-request-id": "told"})
    yield chat("priority", priority=3)
    yield chat(
        "continue the final message",
        messages=said("Hi", "Well"),
        add_generation_prompt=False,
        continue_final_message=True,
    )
    yield chat("both continue and prompt", messages=said("Hi", "Well"), continue_final_message=True)
    yield without("without messages", "messages")
    yield without("without a model", "model")
    yield chat("model null", model=None)
    yield chat("unknown model", model="nobody")
    yield chat("no messages", messages=[])
    yield chat("messages of a wrong type", messages="Hello")
    yield chat("message without a role", messages=[{"content": "Hello"}])
    yield chat("message with an unknown role", messages=[{"role": "clown", "content": "Hello"}])
    yield chat("message without content", messages=[{"role": "user"}])
    yield chat("content of a wrong type", messages=[{"role": "user", "content": 5}])
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    yield chat("image", messages=[{"role": "user", "content": [image]}])
    yield chat("unknown part", messages=[{"role": "user", "content": [{"type": "x"}]}])
    yield chat("over-long prompt", messages=said("word " * 5000))
    yield chat("too many tokens wanted", max_tokens=100_000)
    yield chat("max_tokens 0", max_tokens=0)
    yield chat("max_tokens of a wrong type", max_tokens="many")
    yield chat("max_tokens as text", max_tokens="3")
    yield chat("max_tokens as a float", max_tokens=3.0)
    yield chat("n 0", n=0)
    yield chat("n=2 with temperature 0", n=2)
    yield chat("temperature -1", temperature=-1)
    yield chat("temperature of a wrong type", temperature="hot")
    yield chat("top_p 2", top_p=2)
    yield chat("top_logprobs alone", top_logprobs=2)
    yield chat("top_logprobs 21", logprobs=True, top_logprobs=21)
    yield chat("stream options alone", stream_options=usage)
    yield chat("stream of a wrong type", stream="maybe")
    yield chat("empty salt", cache_salt="")
    yield chat("min over max", min_tokens=5)
    yield chat("stop of a wrong type", stop=5)
    yield chat("tools of a wrong type", tools={"a": 1})
    yield chat("error in a stream", stream=True, messages=said("word " * 5000))
    yield Step("chat bad JSON", CHAT, b'{"model": ')
    yield Step("chat JSON that is no object", CHAT, b"[1]")
    yield Step("chat no body", CHAT, b"")
    yield Step("chat other content type", CHAT, base, headers={"content-type": "text/plain"})
    yield Step("chat GET", CHAT, method="GET")


def completions(model: str) -> Iterator[Step]:
    base = {"model": model, "prompt": TEXT, "max_tokens": 3, "temperature": 0, "ignore_eos": True}

    def completion(name: str, **fields: Any) -> Step:
        return Step(f"completion {name}", COMPLETIONS, {**base, **fields})

    ids = list(range(1000, 1100))
    usage = {"include_usage": True}
    yield completion("plain")
    yield completion("stream", stream=True)
    yield completion("stream with usage", stream=True, stream_options=usage)
    every = {**usage, "continuous_usage_stats": True}
    yield completion("stream with usage in every chunk", stream=True, stream_options=every)
    yield completion("token ids, cold", prompt=ids)
    yield completion("token ids, warm", prompt=ids)
    yield completion("lists of token ids", prompt=[ids, [1, 2, 3]])
    yield completion("list of texts", prompt=[TEXT, "Hi"])
    yield completion("list of texts, n=2", prompt=[TEXT, "Hi"], n=2, temperature=1, seed=1)
    yield completion("list of texts, stream", prompt=[TEXT, "Hi"], stream=True)
    yield completion("n=2", n=2, temperature=1, seed=1)
    yield completion("n=2, stream", n=2, temperature=1, seed=1, stream=True, stream_options=usage)
    yield completion("echo", echo=True)
    yield completion("echo, stream", echo=True, stream=True)
    yield completion("echo with logprobs", echo=True, logprobs=1)
    yield completion("echo alone", echo=True, max_tokens=0)
    yield completion("echo alone, stream", echo=True, max_tokens=0, stream=True)
    yield completion("logprobs", logprobs=2)
    yield completion("logprobs, stream", logprobs=1, stream=True)
    yield completion("prompt logprobs", prompt_logprobs=1)
    yield completion("return token ids", return_token_ids=True)
    yield completion("return token ids, stream", return_token_ids=True, stream=True)
    yield completion("max_tokens by default", max_tokens=None)
    yield completion("suffix", suffix="end")
    yield completion("empty prompt", prompt="")
    yield completion("prompt null", prompt=None)
    yield completion("prompt []", prompt=[])
    yield completion("prompt of a wrong type", prompt=5)
    yield completion("prompt of mixed types", prompt=["a", 5])
    yield completion("prompt with an unknown token", prompt=[10_000_000])
    yield completion("prompt with a negative token", prompt=[-1])
    yield completion("over-long prompt", prompt=[1] * 5000)
    yield completion("prompt of full length", prompt=[1] * 4096)
    yield completion("too many tokens wanted", max_tokens=100_000)
    yield completion("max_tokens 0", max_tokens=0)
    yield completion("max_tokens -1", max_tokens=-1)
    yield completion("logprobs 21", logprobs=21)
    yield completion("logprobs -1", logprobs=-1)
    yield completion("unknown model", model="nobody")
    yield completion("stream options alone", stream_options=usage)
    yield completion("best_of", best_of=2)
    yield Step("completion bad JSON", COMPLETIONS, b"{")
    yield Step("completion GET", COMPLETIONS, method="GET")


def messages(model: str) -> Iterator[Step]:
    # A text that the model does not end within three tokens.
    ask = "Tell me a long story about the sea."
    base = {"model": model, "max_tokens": 3, "messages": said(ask), "temperature": 0}

    def message(name: str, path: str = MESSAGES, **fields: Any) -> Step:
        return Step(f"messages {name}", path, {**base, **fields})

    def without(name: str, field: str) -> Step:
        return Step(f"messages {name}", MESSAGES, {k: v for k, v in base.items() if k != field})

    tool = {"name": "weather", "description": "w", "input_schema": TOOL["function"]["parameters"]}  # type: ignore[index]
    count = f"{MESSAGES}/count_tokens"
    yield message("plain")
    yield message("system", system="Be brief.")
    blocks = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    yield message("system in blocks", system=blocks)
    yield message("content in blocks", messages=[{"role": "user", "content": blocks}])
    long = prose("a message to repeat", 20)
    yield message("long, cold", system=long)
    yield message("long, warm", system=long)
    yield message("stream", stream=True)
    yield message("long, stream", stream=True, system=long)
    forced = {"type": "tool", "name": "weather"}
    yield message("tools, auto", tools=[tool])
    yield message("tools, forced", tools=[tool], tool_choice=forced, max_tokens=60)
    yield message(
        "tools, forced, stream", tools=[tool], tool_choice=forced, max_tokens=60, stream=True
    )
    yield message("unknown model", model="nobody")
    yield without("without max_tokens", "max_tokens")
    yield without("without a model", "model")
    yield message("max_tokens 0", max_tokens=0)
    yield message("no messages", messages=[])
    yield message("unknown role", messages=[{"role": "clown", "content": "Hi"}])
    yield message("over-long", messages=said("word " * 5000))
    yield Step("messages bad JSON", MESSAGES, b"{")
    yield message("count", path=count)
    yield message("count with system", path=count, system="Be brief.")
    yield message("count of an unknown model", path=count, model="nobody")
    yield message("count of nothing", path=count, messages=[])


def responses(model: str) -> Iterator[Step]:
    base = {"model": model, "input": "Hello", "max_output_tokens": 3, "temperature": 0}

    def response(name: str, **fields: Any) -> Step:
        return Step(f"responses {name}", RESPONSES, {**base, **fields})

    long = prose("a response to repeat", 20)
    yield response("plain")
    yield response("instructions", instructions="Be brief.")
    yield response("long, cold", instructions=long)
    yield response("long, warm", instructions=long)
    yield response("messages", input=said("Hello", "Hi.", "And?"))
    parts = [{"type": "input_text", "text": "Hello"}]
    yield response("parts", input=[{"role": "user", "content": parts}])
    yield response("stream", stream=True)
    yield response("stored", request_id="resp_first")
    yield response("continued", previous_response_id="resp_first", input="Go on.")
    yield Step("responses fetched", f"{RESPONSES}/resp_first", method="GET")
    yield Step("responses fetched, unknown", f"{RESPONSES}/resp_nobody", method="GET")
    yield Step("responses fetched, bad id", f"{RESPONSES}/nobody", method="GET")
    yield Step("responses cancelled", f"{RESPONSES}/resp_first/cancel")
    yield Step("responses cancelled, unknown", f"{RESPONSES}/resp_nobody/cancel")
    yield response("continuing an unknown one", previous_response_id="resp_nobody")
    yield response("not stored", store=False)
    yield response("metadata", metadata={"a": "b"}, user="me")
    yield response("background", background=True)
    yield response("background, not stored", background=True, store=False)
    yield response("unknown model", model="nobody")
    yield response("input null", input=None)
    yield response("input []", input=[])
    yield response("over-long", input="word " * 5000)
    yield response("max_output_tokens 0", max_output_tokens=0)
    yield Step("responses bad JSON", RESPONSES, b"{")


def tokens(model: str) -> Iterator[Step]:
    base = {"model": model}
    yield Step("tokenize a prompt", "/tokenize", {**base, "prompt": TEXT})
    yield Step("tokenize special tokens", "/tokenize", {"prompt": "a<|im_end|>b"})
    strings = {"prompt": "Gr\u00fc\u00dfe", "return_token_strs": True}
    yield Step("tokenize with strings", "/tokenize", {**base, **strings})
    yield Step("tokenize messages", "/tokenize", {**base, "messages": said("Hello")})
    bare = {"messages": said("Hello"), "add_generation_prompt": False}
    yield Step("tokenize without a generation prompt", "/tokenize", bare)
    yield Step("tokenize nothing", "/tokenize", base)
    yield Step("tokenize an empty prompt", "/tokenize", {"prompt": ""})
    yield Step("tokenize for an unknown model", "/tokenize", {"model": "nobody", "prompt": "a"})
    yield Step("tokenize a wrong type", "/tokenize", {"prompt": 5})
    yield Step("tokenize bad JSON", "/tokenize", b"{")
    yield Step("detokenize", "/detokenize", {**base, "tokens": [504, 2365, 6354]})
    yield Step("detokenize nothing", "/detokenize", {**base, "tokens": []})
    yield Step("detokenize an unknown token", "/detokenize", {"tokens": [10_000_000]})
    yield Step("detokenize a negative token", "/detokenize", {"tokens": [-1]})
    yield Step("detokenize text", "/detokenize", {"tokens": "a"})
    chat = {**base, "messages": said("Hello"), "max_tokens": 3}
    yield Step("render a chat", f"{CHAT}/render", chat)
    yield Step("render a completion", f"{COMPLETIONS}/render", {**base, "prompt": TEXT})
    prompts = {**base, "prompt": [TEXT, "Hi"]}
    yield Step("render two completions", f"{COMPLETIONS}/render", prompts)
    yield Step("render for an unknown model", f"{CHAT}/render", {**chat, "model": "nobody"})


def pooling(model: str) -> Iterator[Step]:
    """A model that generates has none of these."""
    for path in ("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank"):
        body = {"model": model, "input": TEXT}
        yield Step(f"pooling {path}", path, body)


def state(model: str) -> Iterator[Step]:
    paths = {
        "models": "/v1/models",
        "one model": f"/v1/models/{model}",
        "health": "/health",
        "ping": "/ping",
        "version": "/version",
        "load": "/load",
        "metrics": "/metrics",
        "event sources": "/kv_event_sources",
        "sleeping": "/is_sleeping",
        "server info": "/server_info?config_format=json",
        "nowhere": "/nowhere",
    }
    for name, path in paths.items():
        yield Step(f"state {name}", path, method="GET")
    yield Step("state health, POST", "/health")
    yield Step("state ping, POST", "/ping")
    yield Step("state models, POST", "/v1/models")
    yield Step("state reset", "/reset_prefix_cache")
    yield Step("state sleep at a wrong level", "/sleep?level=9")
    yield Step("state sleep in a wrong mode", "/sleep?mode=x")
    yield Step("state sleep", "/sleep?level=1")
    yield Step("state wake up from it", "/wake_up")
    yield Step("state sleep lightly", "/sleep?level=0")
    yield Step("state asleep", "/is_sleeping", method="GET")
    yield Step("state wake up", "/wake_up")
    yield Step("state awake", "/is_sleeping", method="GET")
