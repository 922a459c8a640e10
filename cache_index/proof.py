"""Whether a prefix is the one that an engine's block hash names: computed as the engine does, and
compared.

vLLM chains `H(serialised (parent hash, tokens of the block, extra keys))` from a seed. Which hash,
which serialisation and which seed is found out from a block whose whole prefix is known. Engines
whose seed is random, or that hash otherwise, prove nothing. No hash made here is ever kept as a
name of ours: a wrong guess compares unequal.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable
from typing import NamedTuple

import xxhash

from cache_index.blocks import TOKEN_BYTES
from cache_index.event_types import EngineHash

__all__ = ["Scheme", "Schemes"]

# vLLM's own seed since 0.29, and what PYTHONHASHSEED is set to where hashes must agree.
_SEEDS = ("vllm-none-hash", "0")
_U64 = (1 << 64) - 1


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xxh3(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes((major << 5 | number,))
    if number < 1 << 8:
        return bytes((major << 5 | 24, number))
    if number < 1 << 16:
        return struct.pack(">BH", major << 5 | 25, number)
    return struct.pack(">BI", major << 5 | 26, number)


def _cbor(value: object) -> bytes:
    """Canonical CBOR of what a block's hash is made from."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(0, value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return _head(3, len(text)) + text
    assert isinstance(value, tuple)
    items = [_SMALL[item] if type(item) is int and item < 65536 else _cbor(item) for item in value]
    return _head(4, len(value)) + b"".join(items)


# Most token ids, ready made: this is what takes the time.
_SMALL = [_head(0, number) for number in range(65536)]


class Scheme(NamedTuple):
    """One way to name blocks."""

    digest: Callable[[bytes], bytes]
    serialise: Callable[[object], bytes]
    seed: str
    tagged: bool

    def names(
        self, tokens: bytes, block_tokens: int, salt: str, known: list[bytes], upto: int
    ) -> list[bytes]:
        """The digests of the first `upto` blocks of `tokens`; goes on from those `known`."""
        step = block_tokens * TOKEN_BYTES
        parent = known[-1] if known else self.digest(self.serialise(self.seed))
        layout = struct.Struct(f"<{block_tokens}I")
        for at in range(len(known) * step, min(upto * step, len(tokens) - step + 1), step):
            keys = self._keys(salt) if salt and not at else None
            block = (parent, layout.unpack_from(tokens, at), keys)
            parent = self.digest(self.serialise(block))
            known.append(parent)
        return known

    def _keys(self, salt: str) -> tuple[object, ...]:
        return (("cache_salt", salt),) if self.tagged else (salt,)


class Schemes:
    """Which of the known schemes the engine of one life uses."""

    def __init__(self) -> None:
        self._sample: tuple[EngineHash, bytes, str] | None = None
        self._found: Scheme | None = None

    def remember(self, name: EngineHash, tokens: bytes, salt: str) -> None:
        """A first block whose tokens and salt are known."""
        if self._sample is None and self._found is None:
            self._sample = (name, tokens, salt)

    def candidates(self, salt: str) -> list[Scheme]:
        """The schemes that may hold for prompts with this salt; none if no scheme is found."""
        if self._found is None and self._sample is not None:
            name, tokens, its_salt = self._sample
            block_tokens = len(tokens) // TOKEN_BYTES
            for scheme in _SCHEMES:
                if same(name, scheme.names(tokens, block_tokens, its_salt, [], 1)[0]):
                    self._found = scheme
                    break
            else:
                self._sample = None
        if self._found is None:
            return []
        if salt:
            return [self._found, self._found._replace(tagged=not self._found.tagged)]
        return [self._found]


def same(name: EngineHash, digest: bytes) -> bool:
    """Whether the wire's name is this digest, whole or its low 64 bits."""
    if isinstance(name, bytes):
        return name == digest
    return name == int.from_bytes(digest, "big") & _U64


_SCHEMES = [
    Scheme(digest, serialise, seed, tagged)
    for digest in (_sha256, _xxh3)
    for serialise in (_pickled, _cbor)
    for seed in _SEEDS
    for tagged in (True, False)
]
