"""What a workload is: sessions of turns, each turn a request that may depend on earlier replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chat:
    """A request to /v1/chat/completions. `messages` are (role, content) pairs."""

    messages: tuple[tuple[str, str], ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A request to /v1/completions with a text prompt: no template is applied."""

    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session. It is due `think_s` after the previous reply was complete.

    The think time of a session's first turn is 0: it is due when the session starts.
    """

    text: str
    max_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation that starts `start_s` after the run does.

    `system` is the system prompt of a chat; None makes every turn a plain completion of its own
    text, independent of earlier replies.
    """

    start_s: float
    turns: tuple[Turn, ...]
    system: str | None = None

    def request(self, replies: Sequence[str]) -> Chat | Completion:
        """The request of turn `len(replies)`, given what the model answered to the turns before."""
        turn = self.turns[len(replies)]
        if self.system is None:
            return Completion(turn.text, turn.max_tokens)
        messages = [("system", self.system)]
        for earlier, reply in zip(self.turns, replies, strict=False):
            messages += [("user", earlier.text), ("assistant", reply)]
        messages.append(("user", turn.text))
        return Chat(tuple(messages), turn.max_tokens)


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions ordered by their start."""

    name: str
    sessions: tuple[Session, ...]

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)
