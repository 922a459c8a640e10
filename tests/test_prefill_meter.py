"""A prompt's remaining prefill, told by the engine's events while its answer is not streamed."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from tests.whole import Whole, whole_way

pytestmark = pytest.mark.slow

# Chunks of 64 tokens, 0.1 s each; then a hundred rounds of decoding that nothing of is seen.
ENGINE = ("--max-batched-tokens", "64", "--prefill-a", "0.0016", "--prefill-b", "0")
SLOW_DECODE = ("--decode-step", "0.05")
QUEUED = re.compile(r"^kvroute_queued_prefill_tokens\{[^}]*\} (\S+)$", re.MULTILINE)


def queued_tokens(whole: Whole) -> float:
    return sum(map(float, QUEUED.findall(whole.client.get("/metrics").text)))


def test_the_queue_of_an_answer_that_is_not_streamed_falls_with_its_chunks() -> None:
    with whole_way(1, replica=(*ENGINE, *SLOW_DECODE)) as whole:
        answers: list[Any] = []
        text = " ".join(f"chunk {number} of many;" for number in range(100))
        asking = threading.Thread(target=lambda: answers.append(whole.chat(text, max_tokens=100)))
        asking.start()
        seen: list[float] = []

        def prefilled() -> bool:
            queued = queued_tokens(whole)
            if queued and (not seen or queued != seen[-1]):
                seen.append(queued)
            return bool(seen) and not queued

        whole.wait(prefilled)
        # Nothing of the answer has come yet: the events alone have told that the prefill is over.
        assert not answers
        asking.join(20)
        assert answers[0].status_code == 200
        assert len(seen) > 3
        assert seen == sorted(seen, reverse=True)
        assert queued_tokens(whole) == 0
