"""GET /admin/sources, and trust in receipts."""

from __future__ import annotations

from dataclasses import replace

from cache_index.types import SourceStatus, Trust
from tests.router.support import answer_ok, chat, running_gateway, scripted

TOKEN = "s3cret"
AUTH = {"authorization": f"Bearer {TOKEN}"}


def status(replica: str) -> SourceStatus:
    return SourceStatus(
        replica=replica,
        rank=0,
        trust=Trust.PARTIAL,
        reason="gap",
        epoch=3,
        last_seq=41,
        batches=42,
        unit_tokens=16,
        last_batch_age_s=1.5,
        leading=True,
        endpoint="tcp://10.0.0.7:5557",
        lag_s=0.01,
        counts={"gap": 1, "duplicate": 2},
        malformed={"event": 0, "frames": 2},
    )


async def test_every_source_is_told_to_those_who_may_ask() -> None:
    async with scripted(answer_ok) as (replica,):
        async with running_gateway(replica, admin_token=TOKEN) as running:
            running.index.statuses = [status(replica.name), replace(status("b"), dials=True)]
            assert (await running.client.get("/admin/sources")).status_code == 401
            told = (await running.client.get("/admin/sources", headers=AUTH)).json()
            first, second = told["sources"]
            assert (first["trust"], first["reason"], first["life"]) == ("partial", "gap", 3)
            assert (first["last_sequence"], first["batches"], first["leading"]) == (41, 42, True)
            assert first["counts"] == {"duplicate": 2, "gap": 1}
            assert first["malformed"] == {"frames": 2}
            assert first["connection"]["style"] == "connected_to"
            assert second["connection"]["style"] == "dials"
            assert told["listeners"] == []
            only = await running.client.get("/admin/sources?replica=b", headers=AUTH)
            assert [each["replica"] for each in only.json()["sources"]] == ["b"]


async def test_a_receipt_says_how_far_each_candidate_was_trusted_then() -> None:
    async with scripted(answer_ok, answer_ok) as replicas:
        async with running_gateway(*replicas, admin_token=TOKEN) as running:
            running.index.statuses = [status(replicas[0].name)]
            body = chat(prompt="word " * 200)
            answer = await running.post(body)
            running.index.statuses = []
            number = answer.headers["x-kvroute-request-id"]
            kept = await running.client.get(f"/admin/decisions/{number}", headers=AUTH)
            trust = {each["replica"]: each["trust"] for each in kept.json()["candidates"]}
            assert trust == {replicas[0].name: "partial", replicas[1].name: None}
            assert kept.json()["chosen"]["trust"] == trust[kept.json()["chosen"]["replica"]]
