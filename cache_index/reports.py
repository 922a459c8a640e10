"""Tells blocks that an engine announces again, because a request used them, from second copies."""

from __future__ import annotations

from collections import Counter

from cache_index.accounts import Account
from cache_index.event_types import BlockStored, EngineHash

__all__ = ["Reports"]


class Reports:
    """What one life's way of reporting is known to be.

    A report begins at a first block that is held already, and so does a second copy. But a request
    that has just stored a chunk does not store the next one in the same step, while one whose
    prefix was reused does: in its batch the report is followed by what comes after it.

    `doubtful` has what may have been a report and was counted as a copy, until one is known.
    """

    def __init__(self) -> None:
        self._known = False
        self._candidate: tuple[Account, EngineHash] | None = None
        self._lengths: set[int] = set()
        self.doubtful: Counter[EngineHash] = Counter()

    def clear(self) -> None:
        """Nothing is held any more."""
        self.doubtful.clear()

    def end_batch(self) -> None:
        self._candidate = None
        self._lengths.clear()

    def notice(self, account: Account, event: BlockStored) -> bool:
        """True at the moment it becomes known that this life reports reuse."""
        if _begins_held(account, event):
            self._candidate = (account, event.hashes[-1])
            return False
        follows = self._candidate == (account, event.parent)
        if not follows or event.kind is None or self._known:
            return False
        self._known = True
        return True

    def is_again(self, account: Account, event: BlockStored) -> bool:
        """Whether this event announces what is there already, and nothing new."""
        if event.reused or (self._known and _begins_held(account, event)):
            self._lengths.add(event.token_count)
            return True
        return False

    def may_be_again(self, account: Account, event: BlockStored) -> bool:
        """Whether this event could be a report, and what it counts is to be remembered."""
        return not self._known and event.kind is not None and _begins_held(account, event)

    def is_hole(self, event: BlockStored) -> bool:
        """The same report about another group: it also names blocks that are not there."""
        return event.reused or (event.parent is None and event.token_count in self._lengths)


def _begins_held(account: Account, event: BlockStored) -> bool:
    if event.parent is not None or not event.hashes:
        return False
    first = account.blocks.get(event.hashes[0])
    return first is not None and first.device > 0
