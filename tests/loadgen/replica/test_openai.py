import openai
import pytest

from tests.loadgen.replica.conftest import StartFleet, until

MESSAGES = [
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "What is a block cache?"},
]


async def test_chat_whole_and_streamed_agree(sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.chat.completions.create(
        model="sim-model", messages=MESSAGES, max_completion_tokens=12
    )
    stream = await sdk.chat.completions.create(
        model="sim-model",
        messages=MESSAGES,
        max_completion_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 16


async def test_the_sdks_own_stream_accumulator(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(
        model="sim-model", messages=MESSAGES, logprobs=True, top_logprobs=2
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"
    tokens = [entry.token for entry in final.choices[0].logprobs.content]
    assert tokens[-1] == "<|im_end|>"
    assert len(tokens) > 20


async def test_completions(sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.completions.create(model="sim-model", prompt=["One", "Two"], max_tokens=5)
    assert [choice.index for choice in whole.choices] == [0, 1]
    stream = await sdk.completions.create(
        model="sim-model", prompt="One", max_tokens=5, stream=True
    )
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == whole.choices[0].text


async def test_models_and_errors(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == ["sim-model"]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await sdk.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="cache_salt"):
        await sdk.chat.completions.create(
            model="sim-model", messages=MESSAGES, extra_body={"cache_salt": ""}
        )


async def test_leaving_a_stream_frees_the_batch(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(decode_step_s=0.01)
    rank = fleet.replicas[0].ranks[0]
    async with openai.AsyncOpenAI(
        base_url=f"{fleet.replicas[0].url}/v1", api_key="none", max_retries=0
    ) as sdk:
        stream = await sdk.chat.completions.create(
            model="sim-model", messages=MESSAGES, max_tokens=5000, stream=True
        )
        await anext(aiter(stream))
        assert rank.running == 1
        await stream.close()
        await until(lambda: (rank.running, rank.kv_usage) == (0, 0.0))
