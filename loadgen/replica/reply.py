"""Replies: fixed by the prompt's token ids, so that real and virtual time agree on them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

from xxhash import xxh3_64_intdigest

_SENTENCES = 512
_SHORTEST_TOKENS = 24
_SPREAD_TOKENS = 160
_MASK = (1 << 64) - 1

_SUBJECTS = (
    "the cache", "a replica", "the scheduler", "our gateway", "every tenant", "the reader",
    "a long prompt", "the first token", "this answer", "the shared pool", "an old block",
    "the next request", "a careful engineer", "the small model", "the waiting queue",
)  # fmt: skip
_VERBS = (
    "keeps", "returns", "explains", "measures", "follows", "needs", "holds", "repeats",
    "compares", "reaches", "describes", "shortens", "remembers", "checks", "carries",
)  # fmt: skip
_OBJECTS = (
    "the same prefix", "one more step", "a short summary", "the order of events",
    "what was asked before", "a number in the table", "the whole history", "its own share",
    "the cost of a miss", "a better estimate", "the end of the line", "two clear reasons",
    "a café menu", "the naïve plan", "an arrow → here", "three stars ★ of five",
)  # fmt: skip
_TAILS = ("", " in time", " again", " for now", " without delay", ", as expected", " on purpose")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What replies are made of, as token ids.

    `continued[i]` and `opening[i]` are one sentence with and without a leading space;
    `breaks` are the token ids after which text opens (they end in white space).
    """

    continued: tuple[tuple[int, ...], ...]
    opening: tuple[tuple[int, ...], ...]
    breaks: frozenset[int]

    @classmethod
    def numbers(cls, size: int = 4096) -> Vocabulary:
        """Sentences of arbitrary ids below `size`, for engines that never show text."""
        random = Random(size)
        sentences = tuple(
            tuple(random.randrange(size) for _ in range(random.randint(6, 14))) for _ in range(64)
        )
        return cls(continued=sentences, opening=sentences, breaks=frozenset())


def build_vocabulary(
    encode: Callable[[str], list[int]], token_texts: Sequence[tuple[int, str]]
) -> Vocabulary:
    """Sentences in the tokens of a real tokenizer; `token_texts` is its (id, text) table."""
    texts = list(_sentence_texts())
    return Vocabulary(
        continued=tuple(tuple(encode(" " + text)) for text in texts),
        opening=tuple(tuple(encode(text)) for text in texts),
        breaks=frozenset(token for token, text in token_texts if text and text[-1].isspace()),
    )


def _sentence_texts() -> Iterator[str]:
    parts = list(product(_SUBJECTS, _VERBS, _OBJECTS, _TAILS))
    for subject, verb, thing, tail in Random(0).sample(parts, _SENTENCES):
        yield f"{subject.capitalize()} {verb} {thing}{tail}."


def reply_tokens(
    prompt_ids: Sequence[int], n: int, vocab: Vocabulary, variant: int = 0
) -> list[int]:
    """The first `n` tokens of the reply to a prompt; `variant` tells parallel samples apart.

    A shorter reply is always the beginning of a longer one.
    """
    state = _state(prompt_ids, variant)
    opens = bool(prompt_ids) and prompt_ids[-1] in vocab.breaks
    sentences = vocab.opening if opens else vocab.continued
    tokens: list[int] = []
    while len(tokens) < n:
        state = (state * 6364136223846793005 + 1442695040888963407) & _MASK
        tokens += sentences[(state >> 33) % len(sentences)]
        sentences = vocab.continued
    del tokens[n:]
    return tokens


def natural_length_tokens(prompt_ids: Sequence[int], variant: int = 0) -> int:
    """How long a reply is when the client sets no limit."""
    return _SHORTEST_TOKENS + _state(prompt_ids, variant) % _SPREAD_TOKENS


def _state(prompt_ids: Sequence[int], variant: int) -> int:
    return xxh3_64_intdigest(array("I", prompt_ids).tobytes(), variant)
