"""What one publisher holds: the engine's block hashes, mapped to our own base units.

Device blocks are counted, because an engine announces a hash once for every physical block that
carries it and removes it as often. Other tiers are sets (`pools.py`). A model with several cache
groups has an account per group; what is told to the index is what all groups of a class have
(`groups.py`), and when a group appears that was not known, all is told anew.

A request can ask an engine to announce the blocks that it reuses (`kv_cache_report_mode="full"`,
vLLM 0.29 on). That looks like a second copy of a prefix, from its first block on. It gives itself
away when, in the same batch, the blocks that the same request adds follow: from then on a prefix
that is announced again is not counted again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from cache_index import pools
from cache_index.accounts import Account, Accounts
from cache_index.blocks import HASH_BYTES, TOKEN_BYTES, chain_packed
from cache_index.event_types import BlockRemoved, BlockStored, EngineHash, Event
from cache_index.flights import RankFlights
from cache_index.groups import FULL
from cache_index.identity import ModelIdentity
from cache_index.operations import Block, NewEpoch, Operation, Remove, Store, runs
from cache_index.orphans import Orphans
from cache_index.reports import Reports
from cache_index.roots import Roots
from cache_index.sparse import Sparse
from cache_index.types import DEVICE

__all__ = ["Block", "Ledger", "NewEpoch", "Operation", "Remove", "Store"]


class Ledger:
    """The engine's blocks of one life, by the engine's hash."""

    def __init__(self, model: ModelIdentity, base_unit_tokens: int) -> None:
        self._base = base_unit_tokens
        self._roots = Roots(model)
        self._tiers = pools.Tiers()
        self.prompts: Callable[[], RankFlights | None] = lambda: None
        self.counts: Counter[str] = Counter()
        self.forget_shape()
        self.clear()

    def forget_shape(self) -> None:
        """A new life may have another block size, other groups, and report in another way."""
        self._accounts = Accounts(self._base)
        self._reports = Reports()
        self._sparse = Sparse(self._accounts, self._roots)
        self._orphans = Orphans(self._base, lambda: self.prompts())

    def clear(self) -> None:
        self._accounts.clear()
        self._reports.clear()
        self._sparse.clear()
        self.orphaned = False
        self._roots.salted = False

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def block_tokens(self) -> int | None:
        """Tokens that a match is a multiple of, once known."""
        return self._accounts.unit * self._base if self._accounts.by_index else None

    @property
    def unit(self) -> int:
        """Base units that a match is a multiple of."""
        return self._accounts.unit

    @property
    def unusable(self) -> str:
        """Why nothing of this life can be credited; empty if it can."""
        return self._accounts.fault

    def unit_of(self, tier: str) -> tuple[int, bool]:
        """Base units per block of a holder; whether it is only a part of what a match needs."""
        return self._accounts.unit_of(tier)

    def held(self) -> Iterator[Store]:
        """Everything held now, as runs that an empty index can take."""
        yield from self._accounts.held()

    def apply(self, events: Iterable[Event], out: list[Operation]) -> bool:
        """Take one batch's events. True if the engine cleared its cache in it."""
        cleared = False
        self._orphans.begin_batch()
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event, out)
            elif isinstance(event, BlockRemoved):
                self._remove(event, out)
            else:
                cleared = True
                self.counts["cleared"] += 1
                self.clear()
                out.append(NewEpoch("cleared"))
        self._settle_sparse(out)
        self._reports.end_batch()
        if self._accounts.reshaped:
            self._accounts.reshaped = False
            out.append(NewEpoch("another cache group"))
            out.extend(self.held())
        return cleared

    # -- stores

    def _store(self, event: BlockStored, out: list[Operation]) -> None:
        tier = self._tiers.of(event.medium)
        if tier != DEVICE:
            self._store_pool(event, tier, out)
            return
        self.counts["stored"] += 1
        account = self._accounts.of(event, self.counts)
        if account is None:
            self.orphaned = self.orphaned or self._accounts.misfit
            return
        if account.rule != FULL or event.token_count > len(event.hashes) * event.block_tokens:
            self._sparse.add(account, event)
            return
        parent: Block | None = None
        if event.parent is not None:
            parent = account.blocks.get(event.parent) or self._accounts.find(event.parent)
            if parent is None:
                parent = self._bind(account, event, out)
            if parent is None:
                self.counts["orphaned"] += len(event.hashes)
                self.orphaned = True
                return
        if self._reports.notice(account, event):
            self._begin_reports(out)
        out.extend(runs(account.label, self._take(account, event, parent)))

    def _bind(self, account: Account, event: BlockStored, out: list[Operation]) -> Block | None:
        """The parent of an orphan that is proven to belong to a prompt in flight."""
        before = self._orphans.find(account, event)
        fresh: list[Block] = []
        for name, block in before:
            if name not in account.blocks:
                account.add(name, block)
            if not block.device:
                block.device = 1
                if account.told(name):
                    fresh.append(block)
        out.extend(runs(account.label, fresh, old=True))
        if before:
            self.counts["bound"] += len(event.hashes)
        return before[-1][1] if before else None

    def _take(self, account: Account, event: BlockStored, parent: Block | None) -> list[Block]:
        """Count the event's blocks; returns those that were not held before."""
        units, credited = self._own_units(event, parent)
        width = event.block_tokens // self._base * HASH_BYTES
        again = self._reports.is_again(account, event)
        doubtful = self._reports.may_be_again(account, event)
        blocks = account.blocks
        fresh: list[Block] = []
        for position, engine_hash in enumerate(event.hashes):
            block = blocks.get(engine_hash)
            if block is None:
                own = units[position * width : (position + 1) * width]
                block = Block(own if position < credited else b"", parent)
                account.add(engine_hash, block)
            if block.device == 0:
                block.device = 1
                if block.units and account.told(engine_hash):
                    fresh.append(block)
            elif not again:
                block.device += 1
                if doubtful:
                    self._reports.doubtful[engine_hash] += 1
            parent = block
        return fresh

    def _own_units(self, event: BlockStored, parent: Block | None) -> tuple[bytes, int]:
        """Our hashes of the event's blocks, and how many of the blocks have any."""
        if parent is not None and not parent.units:
            return b"", 0
        seed, credited = self._roots.seed(event, parent)
        if parent is None and credited and not event.lora_name:
            self._orphans.remember(event, self._roots.salt)
        credited = min(credited, event.token_count // event.block_tokens)
        if credited < len(event.hashes):
            self.counts["uncredited"] += len(event.hashes) - credited
        tokens = event.tokens[: credited * event.block_tokens * TOKEN_BYTES]
        return chain_packed(seed, tokens, self._base), credited

    def _settle_sparse(self, out: list[Operation]) -> None:
        """What needed the other groups' events of its batch to be understood."""
        for account, event in self._sparse.take():
            if self._reports.is_hole(event):
                self.counts["announced_again"] += len(event.hashes)
                continue
            placed = self._sparse.place(account, event)
            self.counts["unplaced"] += len(event.hashes) - len(placed)
            out.extend(runs(account.label, self._count(account, placed)))

    def _count(self, account: Account, placed: Sequence[tuple[EngineHash, Block]]) -> list[Block]:
        fresh: list[Block] = []
        for engine_hash, found in placed:
            block = account.blocks.get(engine_hash)
            if block is None:
                block = found
                account.add(engine_hash, block)
            block.device += 1
            if block.device == 1 and block.units and account.joint(engine_hash):
                fresh.append(block)
        return fresh

    def _begin_reports(self, out: list[Operation]) -> None:
        """The engine announces reused blocks again: what was counted twice may be there once."""
        self.counts["reports_reuse"] += 1
        if len(self._accounts.by_index) == 1:
            out.extend(self._accounts.uncount(self._reports.doubtful))
            self._reports.clear()
            return
        # Such reports name blocks of the other groups that are not there at all.
        self._accounts.clear()
        self._reports.clear()
        self._sparse.clear()
        self.orphaned = True
        out.append(NewEpoch("announces reused blocks"))

    def _store_pool(self, event: BlockStored, tier: str, out: list[Operation]) -> None:
        self.counts["stored_pool"] += 1
        fresh: list[Block] = []
        account = self._accounts.only
        if account is not None and not (self._roots.salted and pools.nameless(event)):
            fresh = pools.take(event, tier, account.blocks)
        self.counts["pool_uncredited"] += len(event.hashes) - len(fresh)
        out.extend(runs(tier, fresh))

    # -- removals

    def _remove(self, event: BlockRemoved, out: list[Operation]) -> None:
        tier = self._tiers.of(event.medium)
        self.counts["removed"] += 1
        if tier == DEVICE:
            self._accounts.heard(event.group)
        if self._sparse.waiting and self._sparse.waits_for(event):
            self._settle_sparse(out)
        for account in self._accounts.named.get(event.group, ()):
            blocks = account.blocks
            for engine_hash in event.hashes:
                block = blocks.get(engine_hash)
                if block is None:
                    self.counts["removed_unknown"] += 1
                    continue
                if block.release(tier) and block.units and account.told(engine_hash):
                    out.append(account.removal(block, tier))
                if not block.device:
                    self._reports.doubtful.pop(engine_hash, None)
                if not block.device and not block.tiers:
                    account.drop(engine_hash, block)
