"""The judge itself: it lets the truth pass, and it convicts listeners with one fault each."""

from collections.abc import Sequence

import pytest

from tests.cache_index.judge.blocks import Prompt
from tests.cache_index.judge.histories import history, shrunk
from tests.cache_index.judge.network import END, Frame
from tests.cache_index.judge.stage import History, Misjudged
from tests.cache_index.judge.world import World

TIERS = ("device", "host")


class Oracle:
    """Knows the truth without listening; `fault` says how it departs from it."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.world = fault, None
        self._asked = 0
        self._remembered: dict[tuple[Prompt, int, str], int] = {}

    def connected(self, rank: int, now: float) -> None: ...
    def disconnected(self, rank: int, now: float) -> None: ...
    def tick(self, now: float) -> None: ...

    def heard(self, rank: int, frame: Frame, now: float) -> None:
        assert frame.seq >= END

    def take_requests(self, rank: int, now: float) -> Sequence[tuple[int, int]]:
        return ()

    def trust(self, rank: int, now: float) -> str:
        return {"trusts nobody": "none", "never sure": "partial"}.get(self.fault, "exact")

    def claimed(self, prompt: Prompt, now: float) -> dict[tuple[int, str], int]:
        return {
            (rank.index, tier): self._claim(rank, prompt, tier)
            for rank in self.world.ranks
            for tier in TIERS
        }

    def _claim(self, rank, prompt: Prompt, tier: str) -> int:
        if self.fault in ("claims nothing", "trusts nobody"):
            return 0
        if self.fault == "other root":
            prompt = prompt._replace(root=prompt.root._replace(salt=None))
        truth = rank.verdict.at_most_exactly(prompt, tier)
        key = (prompt, rank.index, tier)
        if self.fault == "forgets nothing":
            truth = max(truth, self._remembered.get(key, 0))
        self._remembered[key] = truth
        return truth


def convicts(story: History, fault: str) -> bool:
    oracle = Oracle(fault)
    oracle.world = World(story, oracle)
    try:
        oracle.world.run()
    except Misjudged:
        return True
    return False


def test_the_truth_passes() -> None:
    assert not [seed for seed in range(300) if convicts(history(seed), "")]


@pytest.mark.parametrize(
    "fault", ["claims nothing", "trusts nobody", "never sure", "other root", "forgets nothing"]
)
def test_a_faulty_listener_is_convicted(fault: str) -> None:
    assert sum(convicts(history(seed), fault) for seed in range(100)) > 10


def test_a_failing_history_shrinks_to_what_matters() -> None:
    seed = next(s for s in range(200) if convicts(history(s), "other root"))
    small = shrunk(history(seed), lambda story: convicts(story, "other root"))
    assert convicts(small, "other root") and len(small.ops) <= 3
