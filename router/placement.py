"""From a prompt to a rank: the match, the snapshot, the policy's choice. No awaits, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple, Protocol

from cache_index.blocks import chain_packed
from cache_index.identity import ModelIdentity, Root
from cache_index.types import Holder
from router.load import FleetLoad
from router.policy import Candidate, Choice, Policy, Snapshot
from router.replicas import Replica

BYTES_PER_TOKEN_GUESS = 4
"""English text under current tokenizers; used only where a prompt could not be tokenized."""
DEVICE_TIER = "device"


class PrefixIndex(Protocol):
    """What placement needs of the index."""

    def match(self, root: int, hashes: bytes) -> Mapping[Holder, int]:
        """Base units that each holder has from the start of the chain of packed hashes."""
        ...

    def trusts(self) -> Mapping[tuple[str, int], str]:
        """How far each source, by replica and rank, is trusted; never changed once given out."""
        ...


class Prompt(NamedTuple):
    """A prompt to be placed; `token_ids` are packed u32, None when unknown.

    `source` says how they were had: given, local, replica or none.
    """

    model: str
    salt: str
    token_ids: bytes | None
    tokens: int
    source: str = "none"


# Plain tuples, because every request makes one of each.

RootMatch = tuple[str, str, int, Mapping[Holder, int]]
"""Base model, adapter, the root's digest, and what the index said: units by holder of any tier."""
Trusts = Mapping[tuple[str, int], str]
"""How far the source of each (replica, rank) is trusted."""
Match = tuple[Mapping[tuple[str, int], int], Sequence[RootMatch], Trusts, Sequence[bytes]]
"""Tokens credited by (replica, rank), what that was read from and with which trust, and the packed
chain of the prompt from each root."""
NO_MATCH: Match = ({}, (), {}, ())


class Placement(NamedTuple):
    """The decision: where to, what is predicted to be reused, and what it was chosen from."""

    replica: Replica
    rank: int
    matched_tokens: int
    uncached_tokens: int
    snapshot: Snapshot
    choice: Choice


class Placer:
    """Builds the snapshot of a decision and asks the policy."""

    def __init__(
        self,
        index: PrefixIndex,
        load: FleetLoad,
        policy: Policy,
        *,
        base_unit_tokens: int,
        running_share: float,
        random: Random,
    ) -> None:
        self._index = index
        self._load = load
        self._policy = policy
        self._unit_tokens = base_unit_tokens
        self._running_share = running_share
        self._random = random

    def match(self, prompt: Prompt, replicas: Collection[Replica]) -> Match:
        """Matched tokens by (replica, rank); empty where nothing is known.

        The last token is never matched: an engine computes at least one, so a prompt that is
        cached whole is a hit of one block less.
        """
        if prompt.token_ids is None or prompt.tokens <= self._unit_tokens:
            return {}, (), self._index.trusts(), ()
        matched: dict[tuple[str, int], int] = {}
        roots: list[RootMatch] = []
        chains: list[bytes] = []
        for base, adapter in {self._identity(replica, prompt.model) for replica in replicas}:
            root = _root(base, adapter, prompt.salt)
            hashes = chain_packed(root, prompt.token_ids[:-4], self._unit_tokens)
            held = self._index.match(root, hashes)
            roots.append((base, adapter, root, held))
            chains.append(hashes)
            for holder, units in held.items():
                if holder.tier == DEVICE_TIER:
                    matched[holder.replica, holder.rank] = units * self._unit_tokens
        return matched, roots, self._index.trusts(), chains

    def place(
        self,
        prompt: Prompt,
        replicas: Sequence[Replica],
        matched: Mapping[tuple[str, int], int],
        only_rank: int | None = None,
    ) -> Placement:
        """Choose among the ranks of `replicas`, which must not be empty."""
        turn, draw = self._load.next_turn(), self._random.random()
        placement = self._choose(prompt, replicas, matched, only_rank, turn, draw)
        chosen = placement.snapshot.candidates[placement.choice.chosen]
        cost_s = chosen.prefill_fixed_s + placement.uncached_tokens * chosen.prefill_s_per_token
        self._load.placed(cost_s)
        return placement

    def preview(
        self,
        prompt: Prompt,
        replicas: Sequence[Replica],
        matched: Mapping[tuple[str, int], int],
        only_rank: int | None = None,
    ) -> Placement:
        """What `place` would choose now; nothing is counted, learned or drawn by it."""
        state = self._random.getstate()
        draw = self._random.random()
        self._random.setstate(state)
        return self._choose(prompt, replicas, matched, only_rank, self._load.turn, draw)

    def _choose(
        self,
        prompt: Prompt,
        replicas: Sequence[Replica],
        matched: Mapping[tuple[str, int], int],
        only_rank: int | None,
        turn: int,
        draw: float,
    ) -> Placement:
        ranks = [
            (replica, rank)
            for replica in replicas
            for rank in replica.ranks
            if only_rank is None or rank == only_rank
        ]
        snapshot = Snapshot(
            prompt_tokens=prompt.tokens,
            candidates=tuple(
                self._candidate(replica, rank, matched.get((replica.name, rank), 0))
                for replica, rank in ranks
            ),
            turn=turn,
            draw=draw,
            running_cost_s=self._running_share * self._load.mean_prefill_s,
        )
        choice = self._policy(snapshot)
        chosen = snapshot.candidates[choice.chosen]
        uncached = max(prompt.tokens - chosen.matched_tokens, 1)
        replica, rank = ranks[choice.chosen]
        return Placement(replica, rank, chosen.matched_tokens, uncached, snapshot, choice)

    @staticmethod
    def _identity(replica: Replica, model: str) -> tuple[str, str]:
        served = replica.models[model]
        return served.base, served.adapter

    def _candidate(self, replica: Replica, rank: int, matched_tokens: int) -> Candidate:
        load = self._load.rank(replica.name, rank)
        prefill = load.prefill
        return Candidate(
            replica.name,
            rank,
            matched_tokens,
            load.queued_tokens,
            load.queue_s(),
            prefill.fixed_s,
            prefill.s_per_token,
            load.running,
        )


@lru_cache(maxsize=1024)
def _root(base: str, adapter: str, salt: str) -> int:
    """Digest of a chain's root; few are in use at a time."""
    return Root(ModelIdentity(base), adapter, salt).digest()
