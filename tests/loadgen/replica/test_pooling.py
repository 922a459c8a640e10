import math
from typing import Any

import httpx
import openai
import pytest

from tests.loadgen.replica.conftest import StartFleet

MODEL = "sim-model"


async def test_embeddings_through_the_sdk(sdk: openai.AsyncOpenAI) -> None:
    # The SDK asks for base64 unless told otherwise, and decodes it.
    coded = await sdk.embeddings.create(model=MODEL, input=["One", "Two"])
    plain = await sdk.embeddings.create(model=MODEL, input="One", encoding_format="float")
    first, second = (item.embedding for item in coded.data)
    assert first == pytest.approx(plain.data[0].embedding, abs=1e-6)
    assert first != second
    assert math.fsum(value * value for value in first) == pytest.approx(1.0, abs=1e-5)
    assert coded.usage.prompt_tokens > plain.usage.prompt_tokens > 0
    short = await sdk.embeddings.create(model=MODEL, input="One", dimensions=8)
    assert len(short.data[0].embedding) == 8
    assert short.data[0].embedding[1] / short.data[0].embedding[0] == pytest.approx(
        first[1] / first[0], rel=1e-4
    )


async def test_token_ids_are_the_text(client: httpx.AsyncClient) -> None:
    ids = (await client.post("/tokenize", json={"prompt": "A text"})).json()["tokens"]
    vectors = [
        (await client.post("/v1/embeddings", json={"input": given})).json()["data"]
        for given in ("A text", ["A text"], ids, [ids])
    ]
    assert all(each == vectors[0] for each in vectors)


async def test_rerank_sorts_and_cuts(client: httpx.AsyncClient) -> None:
    documents = [f"Document {number}" for number in range(6)]
    asked = {"model": MODEL, "query": "Which?", "documents": documents}
    bodies = [(await client.post(path, json=asked)).json() for path in
              ("/rerank", "/v1/rerank", "/v2/rerank")]  # fmt: skip
    assert bodies[0]["results"] == bodies[1]["results"] == bodies[2]["results"]
    scores = [result["relevance_score"] for result in bodies[0]["results"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(result["index"] for result in bodies[0]["results"]) == list(range(6))
    for result in bodies[0]["results"]:
        assert result["document"]["text"] == documents[result["index"]]
    best = (await client.post("/rerank", json={**asked, "top_n": 2})).json()["results"]
    assert best == bodies[0]["results"][:2]


async def test_score_pairs_its_sides(client: httpx.AsyncClient) -> None:
    async def scores(**asked: Any) -> list[float]:
        answer = (await client.post("/v1/score", json=asked)).json()
        assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
        return [item["score"] for item in answer["data"]]

    one_to_many = await scores(text_1="q", text_2=["a", "b"])
    assert one_to_many == await scores(queries=["q", "q"], documents=["a", "b"])
    assert one_to_many == await scores(data_1="q", data_2=["a", "b"])
    assert len(set(one_to_many)) == 2
    assert (await client.post("/score", json={"text_1": ["a", "b"], "text_2": "c"})).is_error


async def test_classify_and_pooling_are_well_formed(client: httpx.AsyncClient) -> None:
    classes = (await client.post("/classify", json={"input": ["A", "B"]})).json()["data"]
    for item in classes:
        assert sum(item["probs"]) == pytest.approx(1.0)
        assert item["label"] == f"LABEL_{item['probs'].index(max(item['probs']))}"
    pooled = (await client.post("/pooling", json={"input": "A", "dimensions": 4})).json()
    assert pooled["data"][0]["object"] == "pooling"
    assert len(pooled["data"][0]["data"]) == 4


async def test_the_engine_takes_its_time_and_counts(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(prefill_c_s=0.05)
    rank = fleet.replicas[0].ranks[0]
    async with httpx.AsyncClient(base_url=fleet.replicas[0].url) as client:
        answer = await client.post("/v1/embeddings", json={"input": "word " * 100})
        assert answer.elapsed.total_seconds() >= 0.05
        assert rank.stats.prompt == answer.json()["usage"]["prompt_tokens"]
        assert (await client.get("/load")).json() == {"server_load": 0}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/embeddings", {}),
        ("/v1/embeddings", {"input": []}),
        ("/v1/embeddings", {"input": ""}),
        ("/v1/embeddings", {"input": [-1]}),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}),
        ("/v1/embeddings", {"input": [1] * 40000}),
        ("/rerank", {"query": "q", "documents": []}),
        ("/score", {"text_1": "a"}),
    ],
)
async def test_refusals(client: httpx.AsyncClient, path: str, asked: dict[str, Any]) -> None:
    answer = await client.post(path, json=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
