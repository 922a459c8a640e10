"""Block hashes of the simulated engine: a chain, like vLLM's, but over xxh3.

A hash covers its block and everything before it. The root covers what must keep two equal
prompts apart: the engine's seed, the adapter and the tenant's salt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from xxhash import xxh3_64_intdigest

_INT_BYTES = 8
_DIGEST_BYTES = 32


def root_hash(seed: int, salt: str = "", adapter: str = "") -> int:
    """What the chain of one (seed, adapter, salt) starts from."""
    fields = (b"simulated-engine", str(seed).encode(), adapter.encode(), salt.encode())
    return xxh3_64_intdigest(b"".join(len(f).to_bytes(4, "big") + f for f in fields))


def chain(root: int, token_ids: Sequence[int], block_size_tokens: int) -> list[int]:
    """One 64-bit hash per full block of `token_ids`, continuing from `root`."""
    packed = memoryview(array("I", token_ids)).cast("B")
    size_bytes = 4 * block_size_tokens
    hashes: list[int] = []
    parent = root
    for end in range(size_bytes, len(packed) + 1, size_bytes):
        parent = xxh3_64_intdigest(packed[end - size_bytes : end], parent)
        hashes.append(parent)
    return hashes


def hash_digest(block_hash: int) -> bytes:
    """The 32-byte form of a hash; its low 64 bits are the integer form, as in vLLM."""
    tail = block_hash.to_bytes(_INT_BYTES, "big")
    return blake2b(tail, digest_size=_DIGEST_BYTES - _INT_BYTES).digest() + tail
