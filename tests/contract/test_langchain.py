"""langchain-openai, unchanged."""

from __future__ import annotations

import openai
import pytest
from langchain_openai import ChatOpenAI, OpenAI

from tests.contract.conftest import Served

pytestmark = pytest.mark.slow


def chat(served: Served, tokens: int = 8) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{served.url}/v1",
        api_key="none",
        model="sim-model",
        max_completion_tokens=tokens,
        max_retries=0,
    )


async def test_invoke_stream_and_batch_say_the_same(served: Served) -> None:
    model = chat(served)
    whole = model.invoke("Say something.")
    assert whole.content and whole.usage_metadata["output_tokens"] == 8
    assert "".join(str(each.content) for each in model.stream("Say something.")) == whole.content
    assert [each.content for each in model.batch(["Say something."] * 3)] == [whole.content] * 3
    assert (await model.ainvoke("Say something.")).content == whole.content
    pieces = [str(each.content) async for each in model.astream("Say something.")]
    assert "".join(pieces) == whole.content


def test_completions(served: Served) -> None:
    url = f"{served.url}/v1"
    model = OpenAI(base_url=url, api_key="none", model="sim-model", max_tokens=4, max_retries=0)
    assert model.invoke("Once")


def test_errors_are_of_the_right_class(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="sim-model"):
        chat(served).bind(model="nope").invoke("hi")
    with pytest.raises(openai.BadRequestError):
        chat(served, tokens=10**9).invoke("hi")


def test_a_cut_stream_is_an_exception(served: Served) -> None:
    seen = 0
    with pytest.raises(openai.APIError, match="broke off"):
        for _ in chat(served, tokens=4000).stream("Say something."):
            seen += 1
            if seen == 3:
                served.kill()
    assert seen >= 3
