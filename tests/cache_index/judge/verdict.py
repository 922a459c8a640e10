"""The verdict: what a listener may claim of one rank, and what it must when it is exact."""

from collections import Counter
from itertools import pairwise

from tests.cache_index.judge.blocks import Block, Prompt, parent_of
from tests.cache_index.judge.engine import (
    DEVICE,
    HOST,
    Cleared,
    EngineConfig,
    Event,
    Removed,
    Stored,
)
from tests.cache_index.judge.groups import Place, prefix_tokens
from tests.cache_index.judge.wire import shows_adapter_names, shows_groups

LEASE_S = 5.0
TRANSIT_S = 0.25
"""The longest that the modelled network holds a message back."""


class Verdict:
    """Follows what one rank said. Times are the model's clock, in seconds."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._said: Counter[Place] = Counter()
        self._sure: Counter[Place] = Counter()
        self._again: Counter[Place] = Counter()
        self._gone_at: dict[Place, float] = {}
        self._salted = False
        self.changed_at = 0.0

    def say(self, events: tuple[Event, ...], now: float) -> None:
        """A batch left the engine."""
        told = self._told(events)
        doubtful = not self._gives_itself_away(events)
        self._undo_reports(events, now)
        for event in events:
            match event:
                case Stored():
                    self._store(event, told, doubtful)
                case Removed():
                    for block in event.blocks:
                        self._remove(Place(event.tier, event.group, block), now)
                case Cleared():
                    self._clear(event.host, now)
        self.changed_at = now

    def restart(self, now: float) -> None:
        """The life ended: nothing is held any more."""
        self._clear(True, now)
        self.changed_at = now

    def at_most(self, prompt: Prompt, tier: str, now: float) -> int:
        """Tokens that may be claimed: what held within the lease."""
        since = now - LEASE_S - TRANSIT_S
        return self._prefix(
            prompt,
            tier,
            lambda place: self._believed(place) or self._gone_at.get(place, -1e9) >= since,
            1,
        )

    def at_least(self, prompt: Prompt, tier: str) -> int:
        """Tokens that a source must claim which is exact and has heard everything."""
        if prompt.root.adapter and not shows_adapter_names(self._config.version):
            return 0
        return self._prefix(prompt, tier, lambda place: self._sure[place] > 0, 0)

    def at_most_exactly(self, prompt: Prompt, tier: str) -> int:
        """Tokens held now, by what was said last."""
        return self._prefix(prompt, tier, self._believed, 1)

    def _believed(self, place: Place) -> bool:
        return self._said[place] > 0 or self._again[place] > 0

    def _gives_itself_away(self, events: tuple[Event, ...]) -> bool:
        """Whether blocks that are new follow, in their batch, on blocks reported again."""
        last = {e.blocks[-1] for e in events if isinstance(e, Stored) and e.again}
        units = self._config.block_units
        fresh = (e.blocks[0] for e in events if isinstance(e, Stored) and not e.again)
        return any(parent_of(block, units) in last for block in fresh)

    def _undo_reports(self, events: tuple[Event, ...], now: float) -> None:
        """A report that new blocks follow shows what earlier ones of its first block were."""
        units = self._config.block_units
        for report, fresh in pairwise(events):
            if not isinstance(report, Stored) or not isinstance(fresh, Stored):
                continue
            follows = parent_of(fresh.blocks[0], units) == report.blocks[-1]
            if report.again and not fresh.again and follows:
                self._forget_reports(now, report.blocks[0])

    def _forget_reports(self, now: float, first: Block | None = None) -> None:
        for place in list(self._again):
            block = place.block
            if first in (None, Block(block.root, block.path[: self._config.block_units])):
                if self._said[place] <= 0:
                    self._gone_at[place] = now
                del self._again[place]

    def _prefix(self, prompt: Prompt, tier: str, has, slack: int) -> int:
        units = self._config.block_units
        blocks = prompt.blocks(units)
        return prefix_tokens(blocks, units, tier, self._config.groups, has, slack)

    def _store(self, event: Stored, told: set[Block], doubtful: bool) -> None:
        if event.again and not doubtful:
            return
        if event.again:
            self._again.update(Place(event.tier, event.group, b) for b in event.blocks)
            return
        self._salted |= event.blocks[0].root.salt is not None
        named = self._config.named_group and shows_groups(self._config.version)
        bare = event.tier == HOST and self._salted and not named
        for block in event.blocks:
            place = Place(event.tier, event.group, block)
            self._said[place] += 1
            self._gone_at.pop(place, None)
            if not bare and self._is_sure(block, event.placeholder, told):
                self._sure[place] += 1

    def _told(self, events: tuple[Event, ...]) -> set[Block]:
        """Blocks whose place a batch makes known, whatever the order of its events."""
        told: set[Block] = set()
        runs = [e.blocks for e in events if isinstance(e, Stored) and not e.placeholder]
        before = -1
        while before != len(told):
            before = len(told)
            for run in runs:
                if self._is_sure(run[0], False, told):
                    told.update(run)
        return told

    def _is_sure(self, block: Block, placeholder: bool, told: set[Block]) -> bool:
        if placeholder or self._known(block):
            return self._known(block)
        parent = parent_of(block, self._config.block_units)
        return parent is None or self._known(parent) or parent in told

    def _known(self, block: Block) -> bool:
        places = (
            Place(tier, group, block)
            for tier in (DEVICE, HOST)
            for group in range(len(self._config.groups))
        )
        return any(self._sure[place] > 0 for place in places)

    def _remove(self, place: Place, now: float) -> None:
        self._said[place] -= 1
        self._sure[place] = max(self._sure[place] - 1, 0)
        if self._said[place] <= 0:
            del self._said[place]
            self._gone_at[place] = now

    def _clear(self, host: bool, now: float) -> None:
        for place in [p for p in self._said if host or p.tier == DEVICE]:
            del self._said[place]
            self._gone_at[place] = now
        self._sure.clear()
        self._forget_reports(now)
