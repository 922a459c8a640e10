"""Which of the messages heard speak of a request that the doctor sent, and what they say of it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from cache_index.events import BlockStored, EngineHash
from router.doctor.facts import Heard, Ids
from router.doctor.listening import Message

DEVICE_MEDIA = frozenset({None, "", "gpu"})


def hear(
    messages: Iterable[Message], rank: int, salt: str, known_ids: Sequence[Ids]
) -> Heard | None:
    """What was said of a request under `salt`, or None as long as nothing was.

    Its blocks are known by the salt, or, where that is not told, by their tokens: those of one of
    `known_ids`. What follows them is found by its parent.
    """
    first: tuple[Message, BlockStored] | None = None
    tokens: list[int] = []
    sizes: set[int] = set()
    salted = pool = pool_unsalted = False
    last: EngineHash | None = None
    for message, event in _stored(messages):
        ids = unpack(event.tokens)
        if not is_device(event.medium):
            if event.parent is None and _begins(known_ids, ids):
                pool = True
                pool_unsalted |= not tells(event, salt)
                sizes.add(event.block_tokens)
        elif first is None:
            told = tells(event, salt)
            if event.parent is None and ids and (told or _begins(known_ids, ids)):
                first, salted = (message, event), told
        if first is not None and is_device(event.medium) and _follows(event, last, first[1]):
            tokens += ids
            sizes.add(event.block_tokens)
            last = event.hashes[-1] if event.hashes else last
    if first is None:
        return None
    message = first[0]
    return Heard(
        rank=rank,
        on_rank=message.rank,
        said_rank=message.batch.rank,
        topic=message.topic,
        tokens=tuple(tokens),
        block_tokens=frozenset(sizes),
        salted=salted,
        pool=pool,
        pool_unsalted=pool_unsalted,
        late_s=message.at_s - message.batch.timestamp_s,
    )


def unpack(packed: bytes) -> Ids:
    """Token ids of packed u32."""
    return tuple(array("I", packed))


def is_device(medium: str | None) -> bool:
    """Whether blocks are in the replica's own cache and not in a pool."""
    return (medium.lower() if medium else medium) in DEVICE_MEDIA


def tells(event: BlockStored, salt: str) -> bool:
    """Whether an event carries the salt: among the first block's keys, or as SGLang does."""
    keys = event.extra_keys[0] if event.extra_keys else None
    return event.cache_salt == salt or salt in (keys or ())


def _stored(messages: Iterable[Message]) -> Iterable[tuple[Message, BlockStored]]:
    for message in messages:
        for event in message.batch.events:
            if isinstance(event, BlockStored):
                yield message, event


def _begins(known_ids: Sequence[Ids], ids: Ids) -> bool:
    return bool(ids) and any(known[: len(ids)] == ids for known in known_ids)


def _follows(event: BlockStored, last: EngineHash | None, first: BlockStored) -> bool:
    """Whether it goes on where the chain stands; a hybrid model tells its groups side by side."""
    if event.group != first.group:
        return False
    return event is first if last is None else event.parent == last
