"""A workload as token ids: what will be asked and answered, known beforehand.

The simulated engine's reply depends on the prompt's tokens alone, so the whole conversation can be
written down without running it. The oracle plays this plan in virtual time, and the size of the
working set follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from loadgen.workload.model import Chat, Completion, Session, Workload


class Text(Protocol):
    """The model's tokenizer, chat template and replies."""

    def prompt_ids(self, request: Chat | Completion) -> list[int]: ...
    def reply_ids(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]: ...
    def reply_text(self, reply_ids: Sequence[int]) -> str: ...


Hasher = Callable[[Sequence[int]], list[int]]


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """`hashes` are the chained hashes of the full blocks of prompt and reply together."""

    prompt_ids: Sequence[int]
    reply_ids: Sequence[int]
    hashes: Sequence[int]
    think_s: float


@dataclass(frozen=True, slots=True)
class PlannedSession:
    start_s: float
    turns: tuple[PlannedTurn, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Sessions in the order of the workload's."""

    sessions: tuple[PlannedSession, ...]

    @property
    def turns(self) -> list[PlannedTurn]:
        return [turn for session in self.sessions for turn in session.turns]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(turn.prompt_ids) for turn in self.turns)

    @property
    def distinct_blocks(self) -> int:
        """Blocks that an endless cache would hold at the end: the working set."""
        return len({block for turn in self.turns for block in turn.hashes})

    @property
    def largest_request_blocks(self) -> int:
        return max(len(turn.hashes) for turn in self.turns)


def plan(workload: Workload, text: Text, hasher: Hasher) -> Plan:
    """`hasher` gives one chained hash per full block of token ids."""
    return Plan(tuple(_session(session, text, hasher) for session in workload.sessions))


def _session(session: Session, text: Text, hasher: Hasher) -> PlannedSession:
    replies: list[str] = []
    turns: list[PlannedTurn] = []
    for turn in session.turns:
        prompt_ids = text.prompt_ids(session.request(replies))
        reply_ids = text.reply_ids(prompt_ids, turn.max_tokens)
        hashes = hasher([*prompt_ids, *reply_ids])
        turns.append(PlannedTurn(prompt_ids, reply_ids, hashes, turn.think_s))
        replies.append(text.reply_text(reply_ids))
    return PlannedSession(session.start_s, tuple(turns))
