"""A Mooncake trace (JSONL) as text: the same arrivals, lengths and sharing, scaled.

A row has `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one per block
of 512 tokens; an equal id means an equal block after an equal prefix. The trace has no text. Here
an id becomes a run of words drawn from the id alone, each word one token of the model's tokenizer
that does not merge with its neighbours, so that a prompt has exactly the wanted number of tokens
and two prompts share exactly the blocks they share in the trace.

Scaling: a block of 512 tokens becomes `block_tokens` (1 to 512), lengths scale by the same factor
(the last, partial block rounds up), outputs by `output_scale`, times by `time_scale`. Every row is
a request of its own, sent as a plain completion: the later prompts of the trace contain what its
own model had answered, not what the simulated one answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Protocol

import msgspec

from loadgen.errors import TraceError, WorkloadError
from loadgen.workload.model import Session, Turn, Workload

TRACE_BLOCK_TOKENS = 512
_WORD = re.compile(r" [a-z]{2,}")


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace, in its own units (ms and tokens)."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class Tokenizer(Protocol):
    """The part of a `tokenizers.Tokenizer` that is needed here."""

    def get_vocab(self) -> Mapping[str, int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool = ...) -> Encoding: ...


class Encoding(Protocol):
    @property
    def ids(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """How to scale a trace. `time_scale` 0.2 makes it run five times as fast."""

    requests: int = 300
    block_tokens: int = 32
    time_scale: float = 0.2
    output_scale: float = 1 / 16

    def __post_init__(self) -> None:
        if self.requests < 1 or not 1 <= self.block_tokens <= TRACE_BLOCK_TOKENS:
            raise WorkloadError("requests >= 1 and 1 <= block_tokens <= 512 are needed")
        if self.time_scale <= 0 or self.output_scale <= 0:
            raise WorkloadError("time_scale and output_scale must be positive")


def read_trace(path: Path, limit: int) -> list[TraceRow]:
    """The first `limit` rows. Raises TraceError, naming the line, for what is not a trace."""
    decoder = msgspec.json.Decoder(TraceRow)
    rows: list[TraceRow] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(islice(lines, limit), 1):
                rows.append(_checked(decoder.decode(line), path, number))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise TraceError(f"{path}:{len(rows) + 1}: {error}") from error
    if not rows:
        raise TraceError(f"{path}: no rows")
    return rows


def _checked(row: TraceRow, path: Path, number: int) -> TraceRow:
    blocks = -(-row.input_length // TRACE_BLOCK_TOKENS)
    if row.input_length < 1 or row.output_length < 0 or row.timestamp < 0:
        raise TraceError(f"{path}:{number}: lengths and timestamp must not be negative or empty")
    if len(row.hash_ids) != blocks:
        raise TraceError(
            f"{path}:{number}: {row.input_length} tokens are {blocks} blocks,"
            f" but hash_ids has {len(row.hash_ids)}"
        )
    return row


def scaled_input_tokens(row: TraceRow, block_tokens: int) -> int:
    """Tokens of the prompt made from `row`: exact for every prompt `mooncake` returns."""
    full, rest = divmod(row.input_length, TRACE_BLOCK_TOKENS)
    return full * block_tokens + -(-rest * block_tokens // TRACE_BLOCK_TOKENS)


def mooncake(
    rows: Sequence[TraceRow], settings: MooncakeSettings, tokenizer: Tokenizer, seed: int = 0
) -> Workload:
    """Requests in order of arrival, the first one at 0 s."""
    words = single_token_words(tokenizer)
    chosen = sorted(rows[: settings.requests], key=lambda row: row.timestamp)
    blocks: dict[int, list[str]] = {}

    def prompt(row: TraceRow) -> str:
        for block in row.hash_ids:
            if block not in blocks:
                rng = Random(f"mooncake:{seed}:{block}")
                blocks[block] = rng.choices(words, k=settings.block_tokens)
        text = [word for block in row.hash_ids for word in blocks[block]]
        return "".join(text[: scaled_input_tokens(row, settings.block_tokens)])

    def session(row: TraceRow) -> Session:
        start_s = (row.timestamp - chosen[0].timestamp) / 1000 * settings.time_scale
        output_tokens = max(1, round(row.output_length * settings.output_scale))
        return Session(start_s, (Turn(prompt(row), output_tokens),))

    return Workload("mooncake", tuple(session(row) for row in chosen))


def single_token_words(tokenizer: Tokenizer) -> list[str]:
    """Words (" word") that are one token each wherever they stand among others, in a fixed order.

    Byte-level BPE splits text before each space and never merges across a split, so such words
    stay whole in any sequence; that is checked here on the sequence of all of them.
    """
    texts = {token_id: tokenizer.decode([token_id]) for token_id in tokenizer.get_vocab().values()}
    words = [
        text
        for token_id, text in sorted(texts.items())
        if _WORD.fullmatch(text)
        and tokenizer.encode(text, add_special_tokens=False).ids == [token_id]
    ]
    together = tokenizer.encode("".join(words), add_special_tokens=False).ids
    if len(words) < 64 or len(together) != len(words):
        raise WorkloadError(
            f"this tokenizer has {len(words)} words that are one token each, and together they are"
            f" {len(together)} tokens; exact lengths need at least 64 that stay whole"
        )
    return words
