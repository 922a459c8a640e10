"""Token ids to chained block hashes.

A hash names a whole prefix: `h_i = xxh3_64(tokens of unit i, seed=h_{i-1})`, with the root's digest
as `h_{-1}`. Inside the index hashes travel packed, eight bytes each, little endian, because runs of
them are then compared and copied as one byte string.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

import xxhash

__all__ = [
    "HASH_BYTES",
    "TOKEN_BYTES",
    "chain_hashes",
    "chain_packed",
    "pack_hashes",
    "pack_tokens",
    "unpack_hashes",
]

HASH_BYTES = 8
TOKEN_BYTES = 4
_SWAP = sys.byteorder == "big"
_U32 = "I" if array("I").itemsize == TOKEN_BYTES else "L"


def _pack(typecode: str, values: Iterable[int]) -> bytes:
    packed = array(typecode, values)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as u32 little endian. Raises OverflowError or TypeError on anything else."""
    return _pack(_U32, token_ids)


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """64-bit hashes as u64 little endian."""
    return _pack("Q", hashes)


def unpack_hashes(packed: bytes) -> list[int]:
    """The inverse of `pack_hashes`."""
    values = array("Q")
    values.frombytes(packed)
    if _SWAP:
        values.byteswap()
    return values.tolist()


def chain_hashes(root: int, packed_tokens: bytes, unit_tokens: int) -> list[int]:
    """One hash per full unit of `packed_tokens`.

    `root` is a root's digest, or the last hash of a prefix whose continuation `packed_tokens` is.
    A rest shorter than `unit_tokens` is left out.
    """
    step = unit_tokens * TOKEN_BYTES
    view = memoryview(packed_tokens)
    digest = xxhash.xxh3_64_intdigest
    hashes: list[int] = []
    seed = root
    for start in range(0, len(view) - step + 1, step):
        seed = digest(view[start : start + step], seed)
        hashes.append(seed)
    return hashes


def chain_packed(root: int, packed_tokens: bytes, unit_tokens: int) -> bytes:
    """`chain_hashes`, packed."""
    return pack_hashes(chain_hashes(root, packed_tokens, unit_tokens))
