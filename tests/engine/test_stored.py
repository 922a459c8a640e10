"""What one real vLLM says with its stored blocks: how far a prompt is, and what it used again."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.engine.gateway import Answer, Gateway, ask, ask_known, chat, eventually, prose
from tests.engine.install import Engine
from tests.engine.replica import Replica, ReplicaOptions

pytestmark = pytest.mark.engine

SMALL_CHUNKS = ReplicaOptions(more={"max-num-batched-tokens": 256})
VALUE = re.compile(r"^(\w+)(\{[^}]*\})? (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def gateway(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Replica(engine, tmp_path_factory.mktemp("chunks"), SMALL_CHUNKS) as replica:
        replica.start()
        folder = tmp_path_factory.mktemp("gateway")
        with Gateway(folder, [replica.url], replica.model_folder) as running:
            yield running


def metric(gateway: Gateway, name: str, label: str = "") -> float:
    text = httpx.get(f"{gateway.url}/metrics", timeout=10).text
    found = [(n, labels or "", float(v)) for n, labels, v in VALUE.findall(text)]
    return sum(value for n, labels, value in found if n == name and label in labels)


def test_the_queue_of_an_answer_that_is_not_streamed_falls_with_its_chunks(
    gateway: Gateway,
) -> None:
    answers: list[Answer] = []
    body = chat(prose("chunks", 130), max_tokens=200, ignore_eos=True)
    asking = threading.Thread(target=lambda: answers.append(ask(gateway.url, body)))
    asking.start()
    seen: list[float] = []
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        queued = metric(gateway, "kvroute_queued_prefill_tokens")
        if queued and (not seen or queued != seen[-1]):
            seen.append(queued)
        if seen and not queued:
            break
    early = not answers
    asking.join(120)
    assert answers
    assert len(seen) > 2
    assert seen == sorted(seen, reverse=True)
    assert early, "the prefill was over only when the answer was there"


def test_blocks_announced_again_are_found_out(gateway: Gateway) -> None:
    full = {"vllm_xargs": {"kv_cache_report_mode": "full"}}
    system = prose("reports", 40)
    ask(gateway.url, chat(system, "One."))
    for turn in range(3):
        longer = system + " " + prose(f"turn {turn}", 8)
        said = ask_known(gateway.url, chat(longer, "Two.", **full))
        assert said.matched == said.cached

    def noticed() -> bool:
        return metric(gateway, "kvroute_source_events_total", '"reports_reuse"') == 1

    assert eventually(noticed, 5)
