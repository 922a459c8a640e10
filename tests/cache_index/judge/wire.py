"""Events as bytes: the fields and the encoding of each engine version."""

import hashlib
from typing import Any

import msgspec

from tests.cache_index.judge.blocks import PICTURE, Block, parent_of, tokens_of
from tests.cache_index.judge.engine import (
    DEVICE,
    HOST,
    Cleared,
    EngineConfig,
    Event,
    Noise,
    Removed,
    Stored,
)

STORED = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"]
GROUP = ["group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"]
ALWAYS = {"lora_id", "medium", "lora_name", "block_hashes", "parent_block_hash", "token_ids"}
VERSIONS = {
    "0.9.2": (STORED, ["block_hashes"]),
    "0.11.0": ([*STORED, "medium"], ["block_hashes", "medium"]),
    "0.14.1": ([*STORED, "medium", "lora_name"], ["block_hashes", "medium"]),
    "0.19.1": ([*STORED, "medium", "lora_name", "extra_keys"], ["block_hashes", "medium"]),
    "0.22.1": (
        [*STORED, "medium", "lora_name", "extra_keys", *GROUP],
        ["block_hashes", "medium", "group_idx"],
    ),
}
"""Array encodings: their fields in order. Later versions send maps with all fields by name."""
PLACE = ["locality", "ownership"]
LATER = ([*VERSIONS["0.22.1"][0], *PLACE, "session_id"], [*VERSIONS["0.22.1"][1], *PLACE])
ADAPTER_IDS = {"french": 1, "legal": 2}


def shows_extra_keys(version: str) -> bool:
    """Whether salts and pictures can be seen on the wire at all."""
    return version not in ("0.9.2", "0.11.0", "0.14.1")


def shows_adapter_names(version: str) -> bool:
    """Whether an adapter has its name on the wire, not only a number."""
    return version not in ("0.9.2", "0.11.0")


def shows_groups(version: str) -> bool:
    """Whether KV groups can be told apart."""
    return version not in ("0.9.2", "0.11.0", "0.14.1", "0.19.1")


def shows_tiers(version: str) -> bool:
    """Whether the tier is on the wire."""
    return version != "0.9.2"


class Wire:
    """Encodes batches of one life. `seed` is what its hashes start from."""

    def __init__(self, config: EngineConfig, seed: str) -> None:
        self._config, self._seed = config, seed
        self._hashes: dict[Block, int | bytes] = {}

    def batch(self, ts: float, events: tuple[Event, ...], rank: int) -> bytes:
        """One payload: `[ts, events, rank]`."""
        return msgspec.msgpack.encode([ts, [self._event(event) for event in events], rank])

    def _event(self, event: Event) -> Any:
        match event:
            case Stored():
                return self._tagged("BlockStored", 0, self._stored(event))
            case Removed():
                return self._tagged("BlockRemoved", 1, self._removed(event))
            case Cleared():
                return self._tagged("AllBlocksCleared", None, {})
            case Noise():
                return self._noise(event)

    def _tagged(self, tag: str, kind: int | None, fields: dict[str, Any]) -> Any:
        version = self._config.version
        if version in VERSIONS:
            names = [] if kind is None else VERSIONS[version][kind]
            return [tag, *(fields.get(name) for name in names)]
        names = [] if kind is None else LATER[kind]
        given = {n: fields.get(n) for n in names if n in ALWAYS or fields.get(n) is not None}
        return {"type": tag, **given}

    def _stored(self, event: Stored) -> dict[str, Any]:
        units = self._config.block_units
        first, group = event.blocks[0], self._config.groups[event.group]
        parent = parent_of(first, units)
        bare = event.placeholder
        tokens = [t for block in event.blocks for t in tokens_of(block.path[-units:])]
        adapter = first.root.adapter
        return {
            "block_hashes": [self.hash_of(block) for block in event.blocks],
            "parent_block_hash": self.hash_of(parent) if parent and not bare else None,
            "token_ids": [] if bare else tokens,
            "block_size": 0 if bare else len(tokens) // len(event.blocks),
            "lora_id": ADAPTER_IDS[adapter] if adapter else None,
            "medium": self._medium(event.tier),
            "lora_name": adapter,
            "extra_keys": None if bare else self._extra_keys(event.blocks),
            "group_idx": event.group if self._config.named_group else None,
            "kv_cache_spec_kind": group.kind if self._config.named_group else None,
            "kv_cache_spec_sliding_window": group.window_tokens,
        }

    def _removed(self, event: Removed) -> dict[str, Any]:
        return {
            "block_hashes": [self.hash_of(block) for block in event.blocks],
            "medium": self._medium(event.tier),
            "group_idx": event.group if self._config.named_group else None,
        }

    def _noise(self, event: Noise) -> Any:
        if event.block is not None and event.kind % 3 == 0:
            elsewhere = self._stored(Stored(DEVICE, 0, (event.block,)))
            return self._tagged("BlockStored", 0, {**elsewhere, "medium": "EXTERNAL"})
        if self._config.version in VERSIONS:
            return ["BlockDreamt", [1, 2], None]
        return {"type": "BlockDreamt", "block_hashes": [1, 2]}

    def _extra_keys(self, blocks: tuple[Block, ...]) -> list[list[Any] | None] | None:
        keys = [self._keys_of(block) or None for block in blocks]
        return keys if any(keys) else None

    def _keys_of(self, block: Block) -> list[Any]:
        """Untagged, in the order adapter, pictures, salt (first block only)."""
        units = self._config.block_units
        keys: list[Any] = [block.root.adapter] if block.root.adapter else []
        for offset, letter in enumerate(block.path[-units:]):
            if letter > PICTURE:
                name = f"picture-{letter}"
                keys.append([name, offset] if self._config.media_keys == "pair" else name)
        if block.root.salt and len(block.path) == units:
            keys.append(block.root.salt)
        return keys

    def hash_of(self, block: Block) -> int | bytes:
        """The engine's hash of a block, as the wire shows it."""
        if block not in self._hashes:
            digest = hashlib.sha256(repr((self._seed, block)).encode()).digest()
            kind = self._config.hash_kind
            low = int.from_bytes(digest, "big", signed=False) & (2**64 - 1)
            signed = low - 2**64 if low >= 2**63 else low
            self._hashes[block] = {"int": low, "signed": signed, "bytes": digest}[kind]
        return self._hashes[block]

    @staticmethod
    def _medium(tier: str) -> str:
        return {DEVICE: "GPU", HOST: "CPU"}[tier]


def damaged(payload: bytes, kind: int) -> bytes:
    """A payload that cannot be read."""
    wrong = [
        payload[: len(payload) // 2],
        b"\xc1" + payload,
        msgspec.msgpack.encode({"ts": 1.0}),
        msgspec.msgpack.encode([1.0, "no list", 0]),
        msgspec.msgpack.encode([1.0, [["BlockRemoved", "no list", "GPU", None]], 0]),
    ]
    return wrong[kind % len(wrong)]
