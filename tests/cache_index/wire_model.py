"""What a publisher's events mean, told again with dicts and sets, and nothing of the package.

A block is its whole prefix: the tuple of its ancestors' letters and its own, under one salt. The
engine side of this model also writes the wire events of what it does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .publisher import CLEARED, removed, stored

Prefix = tuple[str, tuple[int, ...]]  # salt, letters


def block_tokens(letter: int, size: int) -> list[int]:
    return [letter * 1000 + i for i in range(size)]


@dataclass
class EngineModel:
    """One life of one engine with blocks of `size` tokens."""

    size: int = 16
    life: int = 0
    device: Counter[Prefix] = field(default_factory=Counter)
    host: set[Prefix] = field(default_factory=set)

    def engine_hash(self, prefix: Prefix) -> int:
        return hash((self.life, prefix)) & (2**64 - 1)

    def restart(self) -> None:
        self.life += 1
        self.device.clear()
        self.host.clear()

    def clear(self) -> dict[str, Any]:
        self.device.clear()
        self.host.clear()
        return CLEARED

    def store(self, salt: str, letters: tuple[int, ...], start: int) -> dict[str, Any] | None:
        """Store the blocks of `letters` from `start` on, if the block before `start` is held."""
        prefixes = [(salt, letters[: i + 1]) for i in range(start, len(letters))]
        if not prefixes or (start and not self.device[salt, letters[:start]]):
            return None
        self.device.update(prefixes)
        return stored(
            [self.engine_hash(prefix) for prefix in prefixes],
            [token for letter in letters[start:] for token in block_tokens(letter, self.size)],
            parent=self.engine_hash((salt, letters[:start])) if start else None,
            block_size=self.size,
            extra_keys=[[salt] if salt and i == 0 else None for i in range(start, len(letters))],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )

    def evict(self, choice: int) -> dict[str, Any] | None:
        held = sorted(prefix for prefix, count in self.device.items() if count)
        if not held:
            return None
        prefix = held[choice % len(held)]
        self.device[prefix] -= 1
        return removed([self.engine_hash(prefix)], group_idx=0)

    def offload(self, choice: int, count: int) -> dict[str, Any] | None:
        """The host pool takes some blocks that the device holds (a placeholder event)."""
        held = sorted(prefix for prefix, count in self.device.items() if count)
        if not held:
            return None
        taken = [held[(choice + i) % len(held)] for i in range(count)]
        self.host.update(taken)
        hashes = [self.engine_hash(prefix) for prefix in taken]
        return stored(hashes, [], block_size=0, medium="CPU", group_idx=0)

    def drop_from_host(self, choice: int) -> dict[str, Any] | None:
        if not self.host:
            return None
        prefix = sorted(self.host)[choice % len(self.host)]
        self.host.discard(prefix)
        return removed([self.engine_hash(prefix)], medium="CPU")

    def match(self, tier: str, salt: str, letters: tuple[int, ...]) -> int:
        """Leading blocks of a prompt that this tier holds."""
        held = self.host if tier == "host" else {p for p, n in self.device.items() if n}
        matched = 0
        while matched < len(letters) and (salt, letters[: matched + 1]) in held:
            matched += 1
        return matched
