"""The radix index in Redis: the functions of `functions.lua`, called with deadlines.

Every method raises IndexUnavailable, and nothing else, when Redis cannot be reached, is too slow,
or refuses. The function library is loaded when a call finds it missing, so a flushed or replaced
server repairs itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from cache_index.blocks import HASH_BYTES
from cache_index.changes import holder_record, source_name
from cache_index.errors import IndexUnavailable
from cache_index.groups import Hybrids
from cache_index.types import Holder, SourceKey

__all__ = ["ApplyCall", "Keys", "RedisIndex", "Snapshot", "StreamPage"]

_LIBRARY = "kvroute_2"
_CALL_TIMEOUT_S = 2.0
# A source that no gateway has renewed for this long is forgotten.
_SLOT_TTL_MS = 3_600_000
_STREAM_LENGTH = 4096
_SCAN_COUNT = 1000
_READ_COUNT = 256
_PIECE = struct.Struct("<HHQ")


class Keys:
    """The names of an index's keys; one hash tag keeps them in one slot."""

    def __init__(self, namespace: str, base_unit_tokens: int) -> None:
        # Chains over another base unit are another index.
        self.prefix = b"{%s:1:%d}" % (namespace.encode(), base_unit_tokens)
        self.meta = self.prefix + b"m"
        self.holders = self.prefix + b"h"
        self.changes = self.prefix + b"c"
        self.nodes = self.prefix + b"n"

    def slot(self, key: SourceKey) -> bytes:
        return self.prefix + b"s" + source_name(key)

    def lease(self, key: SourceKey) -> bytes:
        return self.prefix + b"l" + source_name(key)


@dataclass(frozen=True, slots=True)
class ApplyCall:
    """Operations of one source under its fencing token; `write` makes a repetition harmless."""

    key: SourceKey
    token: int
    write: int
    operations: bytes


class StreamPage(NamedTuple):
    """Changes after a position; `complete` if there were no more when Redis answered."""

    generation: bytes | None
    entries: list[tuple[int, bytes]]
    complete: bool


class Tail(NamedTuple):
    """The index's generation and the number of its last change."""

    generation: bytes | None
    position: int


class Snapshot(NamedTuple):
    """The state from which a mirror starts; changes up to `position` are contained in it."""

    generation: bytes | None
    position: int
    holders: dict[bytes, bytes]


@contextlib.asynccontextmanager
async def _deadline() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            yield
    except (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise IndexUnavailable(f"{type(error).__name__}: {error}") from error


class RedisIndex:
    """One connection pool to one Redis, and the index in it."""

    def __init__(
        self, url: str, *, base_unit_tokens: int, max_units: int, namespace: str = "kvroute"
    ) -> None:
        # RESP2 keeps the shapes of replies the same on every server version.
        # Its annotations do not cover commands given by name.
        self._client: Any = Redis.from_url(
            url,
            protocol=2,
            socket_connect_timeout=_CALL_TIMEOUT_S,
            # Deadlines are `_deadline`'s: with this set the client uses `asyncio.wait_for`, which
            # on Python 3.11 can swallow the cancellation of a task that is being closed.
            socket_timeout=None,
            retry=Retry(NoBackoff(), 0),
            max_connections=16,
        )
        self.keys = Keys(namespace, base_unit_tokens)
        self._max_units = max_units

    async def close(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._client.aclose()

    async def load_functions(self) -> None:
        """Put this version's functions into Redis, over what is there of the same version."""
        source = files("cache_index").joinpath("functions.lua").read_bytes()
        async with _deadline():
            await self._client.execute_command("FUNCTION", "LOAD", "REPLACE", source)

    async def acquire(
        self, key: SourceKey, owner: str, ttl_ms: int, generation: str
    ) -> tuple[int, int]:
        """Ask for a source's lease: (fencing token, last epoch), or (0, ms it is still taken)."""
        reply = await self._call("acquire", key, owner, ttl_ms, _SLOT_TTL_MS, generation)
        return int(reply[0]), int(reply[1])

    async def renew(self, key: SourceKey, owner: str, ttl_ms: int, token: int) -> bool:
        """Keep a lease; False if it is lost."""
        return bool(await self._call("renew", key, owner, ttl_ms, _SLOT_TTL_MS, token))

    async def release(self, key: SourceKey, owner: str) -> None:
        """Give a lease back; what was written stays until another epoch voids it."""
        await self._call("release", key, owner)

    async def forget(self, key: SourceKey, owner: str, token: int) -> None:
        """Void all holders of a source that is gone for good."""
        await self._call("forget", key, owner, token, _STREAM_LENGTH)

    async def apply(self, calls: Sequence[ApplyCall]) -> list[tuple[str, bytes] | IndexUnavailable]:
        """Apply calls in one round trip. Each answers ("ok", places), ("dup", b"") or fenced."""
        pipe = self._client.pipeline(transaction=False)
        for call in calls:
            pipe.execute_command(
                "FCALL",
                f"{_LIBRARY}_apply",
                2,
                self.keys.slot(call.key),
                self.keys.meta,
                self.keys.prefix,
                source_name(call.key),
                call.token,
                call.write,
                self._max_units,
                _STREAM_LENGTH,
                call.operations,
            )
        async with _deadline():
            replies = await pipe.execute(raise_on_error=False)
        if any(_missing_library(reply) for reply in replies):
            await self.load_functions()
        return [_outcome(reply) for reply in replies]

    async def match(self, packed: bytes) -> dict[Holder, int]:
        """Like the mirror's match, answered by Redis itself; trust is not looked at."""
        reply = await self._fcall("match", [self.keys.meta], [self.keys.prefix, packed], "FCALL_RO")
        answer: dict[Holder, int] = {}
        hybrids = Hybrids()
        for record_bytes, units, pieces in zip(reply[::3], reply[1::3], reply[2::3], strict=True):
            record = holder_record(record_bytes)
            for at, count, mask in _PIECE.iter_unpack(pieces):
                hybrids.part(record.holder, record.number, at, mask & (1 << count) - 1)
            if record.shape is not None and not record.number:
                hybrids.lead(record.holder, record.shape, units)
            if record.shape is not None:
                continue
            whole = units - units % record.unit
            if whole > answer.get(record.holder, 0):
                answer[record.holder] = whole
        return answer | hybrids.answer()

    async def sweep(self, nodes: int) -> tuple[int, int, bool]:
        """One step of cleaning: (nodes seen, nodes left, the round is complete)."""
        reply = await self._fcall(
            "sweep", [self.keys.meta], [self.keys.prefix, nodes, _STREAM_LENGTH]
        )
        return int(reply[0]), int(reply[1]), bool(reply[2])

    async def totals(self) -> tuple[int, int]:
        """Units and nodes in the index."""
        async with _deadline():
            units, nodes = await self._client.execute_command(
                "HMGET", self.keys.meta, "units", "nodes"
            )
        return int(units or 0), int(nodes or 0)

    # -- the mirror's side

    async def snapshot(self) -> Snapshot:
        """Where a mirror starts; `nodes` must be read after this."""
        async with _deadline():
            pipe = self._client.pipeline(transaction=False)
            pipe.execute_command("HMGET", self.keys.meta, "gen", "seq")
            pipe.execute_command("HGETALL", self.keys.holders)
            (generation, seq), holders = await pipe.execute()
        return Snapshot(generation, int(seq or 0), dict(holders))

    async def tail(self) -> Tail:
        """Where the change stream ends now."""
        async with _deadline():
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                generation, seq = await self._client.execute_command(
                    "HMGET", self.keys.meta, "gen", "seq"
                )
        return Tail(generation, int(seq or 0))

    async def nodes(self) -> AsyncGenerator[list[tuple[bytes, bytes]]]:
        """All nodes, in pages of (node id, value)."""
        cursor: int | bytes = 0
        pattern = _literal(self.keys.nodes) + b"*"
        while True:
            async with _deadline():
                cursor, found = await self._client.execute_command(
                    "SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT
                )
                values = await self._client.execute_command("MGET", *found) if found else []
            prefix = len(self.keys.nodes)
            yield [
                (key[prefix:], value)
                for key, value in zip(found, values, strict=True)
                if value is not None and len(key) == prefix + HASH_BYTES
            ]
            if int(cursor) == 0:
                return

    async def read_changes(self, position: int, block_ms: int) -> StreamPage:
        """Changes after `position`, waiting at most `block_ms` for the first."""
        async with _deadline():
            pipe = self._client.pipeline(transaction=False)
            pipe.execute_command("HGET", self.keys.meta, "gen")
            pipe.xread({self.keys.changes: f"{position}-0"}, count=_READ_COUNT, block=block_ms)
            generation, streams = await pipe.execute()
        entries = [
            (int(entry_id.partition(b"-")[0]), fields[b"d"])
            for _, page in streams or ()
            for entry_id, fields in page
        ]
        return StreamPage(generation, entries, len(entries) < _READ_COUNT)

    # -- calls

    async def _call(self, name: str, key: SourceKey, *args: object) -> Any:
        keys = [self.keys.slot(key), self.keys.lease(key)]
        return await self._fcall(name, keys, [self.keys.prefix, *args])

    async def _fcall(
        self, name: str, keys: Sequence[bytes], args: Sequence[object], command: str = "FCALL"
    ) -> Any:
        call = (command, f"{_LIBRARY}_{name}", len(keys), *keys, *args)
        async with _deadline():
            try:
                return await self._client.execute_command(*call)
            except ResponseError as error:
                if not _missing_library(error):
                    raise
            await self.load_functions()
            return await self._client.execute_command(*call)


def _missing_library(reply: object) -> bool:
    return isinstance(reply, ResponseError) and "Function not found" in str(reply)


def _outcome(reply: Any) -> tuple[str, bytes] | IndexUnavailable:
    if isinstance(reply, Exception):
        return IndexUnavailable(str(reply))
    return reply[0].decode(), reply[1]


def _literal(pattern: bytes) -> bytes:
    """Escape what SCAN's MATCH would take for a wildcard."""
    return b"".join(b"\\" + bytes([c]) if c in b"[]*?\\" else bytes([c]) for c in pattern)
