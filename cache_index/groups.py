"""Cache groups of hybrid models: each kind of layer has blocks of its own and a rule of its own.

A prefix of p units can be reused where every class of groups allows it: full attention has all of
[0, p), a recurrent state has its snapshot at p, a sliding window has the units before p that the
window reaches, and p is a whole number of every class's blocks. Groups of one kind, block and
window are one class: an engine looks them up together, so a block counts once all of them have it.

A class is a holder of its own in Redis. Its record names the class and all the others ("shape"), so
that a reader who knows only some of them knows that too, and credits nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from cache_index.types import Holder

__all__ = ["FULL", "STATE", "WINDOW", "GroupClass", "Hybrids", "Shape", "part_of", "rule_of"]

FULL, WINDOW, STATE = "f", "w", "s"
_SEPARATOR = "\0"
_FULL_KINDS = frozenset(
    # No kind: engines before vLLM 0.22, and SGLang. The chunk of chunked local attention is not
    # on the wire, and holding everything is more than it needs.
    {None, "full_attention", "mla_attention", "sink_full_attention", "chunked_local_attention"}
)
_WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})


def rule_of(kind: str | None, group: int | None) -> str | None:
    """The rule for groups of a kind, None if there is none that is known to be safe."""
    if kind is None and group:
        return None
    if kind in _FULL_KINDS:
        return FULL
    if kind in _WINDOW_KINDS:
        return WINDOW
    return STATE if kind == "mamba" else None


@dataclass(frozen=True, slots=True, order=True)
class GroupClass:
    """Rule, block in base units, and base units before p that must be held (windows only)."""

    rule: str
    unit: int
    need: int = 0

    @classmethod
    def of(cls, rule: str, block_tokens: int, base: int, window_tokens: int | None) -> GroupClass:
        unit = block_tokens // base
        if rule == WINDOW and window_tokens:
            # The next token sees the window less itself; engines ask for whole blocks.
            blocks = -(-(window_tokens - 1) // block_tokens)
            return cls(WINDOW, unit, blocks * unit)
        # A window nobody told us the size of: everything before p is enough.
        return cls(FULL if rule == WINDOW else rule, unit)


@dataclass(frozen=True, slots=True)
class Shape:
    """The classes of one engine; the first is the one a match is led by: full attention."""

    classes: tuple[GroupClass, ...]

    @classmethod
    def of(cls, classes: Iterable[GroupClass]) -> Shape:
        return cls(tuple(sorted(set(classes), key=lambda each: (each.rule != FULL, each))))

    @property
    def unit(self) -> int:
        """Base units that a match is a multiple of."""
        return lcm(*(each.unit for each in self.classes))

    def label(self, tier: str, number: int) -> str:
        """How Redis knows a class's holdings in a tier."""
        text = ";".join(f"{each.rule}{each.unit},{each.need}" for each in self.classes)
        return f"{tier}{_SEPARATOR}{number}{_SEPARATOR}{text}"

    def match(self, lead: int, masks: Mapping[int, int]) -> int:
        """The largest p <= `lead`, which the first class covers, that all others allow.

        `masks` has a bit per base unit from the start of the prompt.
        """
        allowed = (1 << lead) - 1
        for number, each in enumerate(self.classes[1:], 1):
            allowed &= _allowed(each, masks.get(number, 0), lead)
        unit = self.unit
        while allowed:
            length = allowed.bit_length()
            if length % unit == 0:
                return length
            # Everything above the next whole unit is out at once.
            allowed &= (1 << length - length % unit) - 1
        return 0


def _allowed(each: GroupClass, mask: int, lead: int) -> int:
    """Bit p-1 is set where this class allows a match of p units."""
    if each.rule == STATE:
        return mask
    if each.rule == FULL or each.need >= lead:
        covered = (~mask & (mask + 1)).bit_length() - 1
        return (1 << covered) - 1
    # Before the prompt nothing is missing.
    runs = (mask << each.need) | ((1 << each.need) - 1)
    have = 1
    while have < each.need:
        step = min(have, each.need - have)
        runs &= runs << step
        have += step
    return runs >> each.need


def part_of(tier: str) -> tuple[str, int, Shape | None]:
    """A label's tier, class and shape; None where a holder has no classes."""
    name, _, rest = tier.partition(_SEPARATOR)
    if not rest:
        return name, 0, None
    number, _, text = rest.partition(_SEPARATOR)
    return name, int(number), _shape(text)


@lru_cache(maxsize=256)
def _shape(text: str) -> Shape:
    classes = []
    for part in text.split(";"):
        unit, _, need = part[1:].partition(",")
        classes.append(GroupClass(part[0], int(unit), int(need)))
    return Shape(tuple(classes))


class Hybrids:
    """Collects what a prompt's match finds of holders with several classes, and answers."""

    def __init__(self) -> None:
        self._leads: dict[Holder, tuple[Shape, int]] = {}
        self._masks: dict[Holder, dict[int, int]] = {}

    def lead(self, holder: Holder, shape: Shape, units: int) -> None:
        """The first class covers `units` from the start."""
        self._leads[holder] = (shape, units)

    def leads(self, holder: Holder) -> bool:
        return holder in self._leads

    def part(self, holder: Holder, number: int, at: int, mask: int) -> None:
        """Another class holds these units, counted from unit `at`."""
        masks = self._masks.setdefault(holder, {})
        masks[number] = masks.get(number, 0) | mask << at

    def answer(self) -> dict[Holder, int]:
        found = {
            holder: shape.match(units, self._masks.get(holder, {}))
            for holder, (shape, units) in self._leads.items()
        }
        return {holder: units for holder, units in found.items() if units}
