"""What is cached: blocks that stand for their whole prefix, and the prompts made of them."""

from functools import lru_cache
from typing import NamedTuple

UNIT_TOKENS = 4
"""Tokens in one letter: the base unit of the index that is judged."""
PICTURE = 90
"""Letters from here on are pictures: one token id for all of them, told apart by their key."""


class Root(NamedTuple):
    """What a prefix starts from, besides the model."""

    adapter: str | None = None
    salt: str | None = None


class Block(NamedTuple):
    """A cached block: its root and every letter up to its end. Its own are the last few."""

    root: Root
    path: tuple[int, ...]


class Prompt(NamedTuple):
    """A prompt as letters of UNIT_TOKENS tokens each."""

    root: Root
    letters: tuple[int, ...]

    def blocks(self, units: int) -> tuple[Block, ...]:
        """The full blocks of `units` letters, first to last."""
        return _blocks(self.root, self.letters, units)

    def tokens(self) -> list[int]:
        """Token ids, with a rest that fills no unit."""
        return [*tokens_of(self.letters), 7]

    def has_pictures(self) -> bool:
        """Whether some letter is a picture."""
        return any(letter > PICTURE for letter in self.letters)


@lru_cache(maxsize=4096)
def _blocks(root: Root, letters: tuple[int, ...], units: int) -> tuple[Block, ...]:
    whole = len(letters) // units
    return tuple(Block(root, letters[: (i + 1) * units]) for i in range(whole))


def tokens_of(letters: tuple[int, ...]) -> list[int]:
    """The token ids of these letters. All pictures, and the plain letter PICTURE, look alike."""
    return [
        token
        for letter in letters
        for token in range(min(letter, PICTURE) * 10, min(letter, PICTURE) * 10 + UNIT_TOKENS)
    ]


def parent_of(block: Block, units: int) -> Block | None:
    """The block before this one in its chain; None for the first."""
    path = block.path[:-units]
    return Block(block.root, path) if path else None
