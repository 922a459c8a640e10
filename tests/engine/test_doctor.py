"""The doctor and a real vLLM: nothing where it is well, and each thing that is off."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from router.config import Settings
from router.doctor import ReplicaFacts, Severity, findings
from router.doctor.gather import Examiner
from router.engines import EngineKind
from router.identify import load_tokenizers
from tests.engine.install import Engine
from tests.engine.replica import BLOCK_TOKENS, MODEL, Replica, ReplicaOptions

pytestmark = pytest.mark.engine

ANSWER_S = 20.0


async def examined(
    replica: Replica, *, active: bool = True
) -> tuple[tuple[ReplicaFacts], Settings]:
    settings = Settings(replicas=[{"url": replica.url}], tokenizer=replica.model_folder)
    async with httpx.AsyncClient(trust_env=False) as client:
        examiner = Examiner(client, settings, load_tokenizers(settings), ANSWER_S, active)
        return (await examiner.examine(settings.replicas[0]),), settings


@pytest.fixture(scope="module")
def misled(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """Prefix caching is off, and so is everything that reuse is told by."""
    options = ReplicaOptions(
        flags=("no-enable-prefix-caching",),
        without=frozenset(
            {"kv-events-config", "enable-prefix-caching", "enable-prompt-tokens-details"}
        ),
    )
    with Replica(engine, tmp_path_factory.mktemp("misled"), options) as running:
        running.start()
        yield running


@pytest.mark.parametrize("active", [True, False])
async def test_nothing_is_found_of_an_engine_that_is_well(replica: Replica, active: bool) -> None:
    facts, settings = await examined(replica, active=active)
    assert findings(facts, settings) == ()
    (one,) = facts
    assert (one.kind, one.model, one.block_tokens) == (EngineKind.VLLM, MODEL, BLOCK_TOKENS)
    assert one.prefix_caching is True and one.version is not None
    assert one.own == one.said and one.own.chat is not None
    assert [(each.connected, each.replays) for each in one.publishers] == [(True, True)]
    if not active:
        return
    assert one.probe is not None
    first, again, other = one.probe.cached
    assert (first, other) == (0, 0)
    assert again == (one.probe.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS > 0
    (heard,) = one.probe.heard
    assert heard.salted and heard.block_tokens == {BLOCK_TOKENS}
    assert one.probe.expected is not None
    assert heard.tokens == one.probe.expected[: len(heard.tokens)] != ()


async def test_everything_that_is_off_is_found(misled: Replica) -> None:
    facts, settings = await examined(misled)
    found = {each.code: (each.severity, each.mend) for each in findings(facts, settings)}
    assert found.keys() == {"events_off", "prefix_caching_off", "prompt_tokens_details_off"}
    assert found["events_off"][0] is found["prefix_caching_off"][0] is Severity.ERROR
    assert "--kv-events-config" in found["events_off"][1]
    assert "without --no-enable-prefix-caching" in found["prefix_caching_off"][1]
    assert "--enable-prompt-tokens-details" in found["prompt_tokens_details_off"][1]
