"""The engine: what one life of one rank holds, and the events it says about it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.cache_index.judge.blocks import UNIT_TOKENS, Block, Prompt, parent_of
from tests.cache_index.judge.groups import FULL, RECURRENT, Group, Place, prefix_tokens

DEVICE, HOST = "device", "host"


class Stored(NamedTuple):
    """A run of blocks, each the child of the one before. `again`: reused, no new copy."""

    tier: str
    group: int
    blocks: tuple[Block, ...]
    placeholder: bool = False
    again: bool = False


class Removed(NamedTuple):
    """One copy of each of these blocks is gone."""

    tier: str
    group: int
    blocks: tuple[Block, ...]


class Cleared(NamedTuple):
    """The device tier is empty; the host tier too if `host`."""

    host: bool


class Noise(NamedTuple):
    """Something that says nothing about device or host: a tag, field or medium of tomorrow."""

    kind: int
    block: Block | None = None


Event = Stored | Removed | Cleared | Noise


@dataclass(frozen=True)
class EngineConfig:
    """How a rank is built and how it speaks."""

    version: str = "0.32.0"
    hash_kind: str = "int"
    block_units: int = 1
    groups: tuple[Group, ...] = (Group(),)
    host: str = "described"
    reports_again: bool = False
    media_keys: str = "pair"
    named_group: bool = True


@dataclass
class Engine:
    """What one life holds: copies by place. Every change appends the event that tells it."""

    config: EngineConfig
    copies: Counter[Place] = field(default_factory=Counter)
    unsaid: list[Event] = field(default_factory=list)

    def take_events(self) -> tuple[Event, ...]:
        """The events since the last step, for the batch of this one."""
        events, self.unsaid = tuple(self.unsaid), []
        return events

    def compute(self, prompt: Prompt, upto: int, doubles: bool) -> None:
        """Prefill or decode up to `upto` blocks: every group stores what it keeps of them.

        With `doubles` what lies behind the reusable prefix is computed, and so stored, again.
        """
        blocks = prompt.blocks(self.config.block_units)[:upto]
        reused = self._reusable(blocks)
        if self.config.reports_again and reused:
            self._report_again(blocks[:reused])
        doubles = doubles or len(self.config.groups) > 1
        for index in range(len(self.config.groups)):
            self._store(DEVICE, index, self._kept(index, blocks, reused, doubles))

    def offload(self, prompt: Prompt, first: int, upto: int) -> None:
        """Copy blocks that the device holds to the host tier."""
        if self.config.host == "none":
            return
        blocks = prompt.blocks(self.config.block_units)[first:upto]
        here = [b for b in blocks if self.copies[Place(DEVICE, 0, b)]]
        self._store(HOST, 0, [b for b in here if not self.copies[Place(HOST, 0, b)]])

    def evict(self, pick: int, count: int, tier: str) -> None:
        """Forget copies anywhere in their chains; one event each, or one for neighbours."""
        held = [place for place in self.copies if place.tier == tier]
        gone = [held[(pick * 7 + i) % len(held)] for i in range(min(count, len(held)))]
        for place in gone:
            self._forget(place)
        if len({place.group for place in gone}) == 1 and pick % 2:
            self.unsaid.append(Removed(tier, gone[0].group, tuple(p.block for p in gone)))
        else:
            self.unsaid += [Removed(tier, p.group, (p.block,)) for p in gone]

    def clear(self, host: bool) -> None:
        """reset_prefix_cache: the device tier, and the host tier if asked."""
        for place in [p for p in self.copies if host or p.tier == DEVICE]:
            del self.copies[place]
        self.unsaid.append(Cleared(host))

    def _reusable(self, blocks: Sequence[Block]) -> int:
        units = self.config.block_units
        tokens = prefix_tokens(
            blocks, units, DEVICE, self.config.groups, lambda place: self.copies[place] > 0, 1
        )
        return tokens // (units * UNIT_TOKENS)

    def _kept(self, index: int, blocks: Sequence[Block], reused: int, doubles: bool) -> list[Block]:
        fresh = [b for b in blocks[reused:] if doubles or not self.copies[Place(DEVICE, index, b)]]
        if self.config.groups[index].kind == FULL:
            return fresh
        # A state group keeps what its window or its last snapshot needs.
        keep = 1 if self.config.groups[index].kind == RECURRENT else 3
        return [b for b in fresh if b in blocks[-keep:]]

    def _report_again(self, blocks: Sequence[Block]) -> None:
        for index, group in enumerate(self.config.groups):
            if group.kind == FULL:
                self.unsaid.append(Stored(DEVICE, index, tuple(blocks), again=True))

    def _store(self, tier: str, index: int, blocks: Sequence[Block]) -> None:
        bare = tier == HOST and self.config.host == "placeholder"
        for run in _runs(blocks, self.config.block_units):
            self.copies.update(Place(tier, index, b) for b in run)
            self.unsaid.append(Stored(tier, index, tuple(run), placeholder=bare))

    def _forget(self, place: Place) -> None:
        self.copies[place] -= 1
        if self.copies[place] <= 0:
            del self.copies[place]


def _runs(blocks: Sequence[Block], units: int) -> list[list[Block]]:
    runs: list[list[Block]] = []
    for block in blocks:
        if runs and parent_of(block, units) == runs[-1][-1]:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs
