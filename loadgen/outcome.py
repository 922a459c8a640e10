"""What became of one request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """Times are seconds on the run's clock; None for what never happened.

    `error` is None for a whole answer, else its kind: connect, timeout, http_<status>, transport,
    truncated (the stream ended without [DONE]), stream_error (an error event in the stream),
    malformed (not what the API promises), empty (no token), not_sent. `cached_tokens` is what the
    engine says it reused, `matched_tokens` what the gateway had predicted, if it said so.
    """

    session: int
    turn: int
    due_s: float
    sent_s: float | None = None
    first_token_s: float | None = None
    done_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    matched_tokens: int | None = None
    replica: str = ""
    reply: str = ""
    error: str | None = None
    detail: str = ""

    @property
    def ttft_s(self) -> float | None:
        """From when the request was due, so that a late client cannot flatter the server."""
        return None if self.first_token_s is None else self.first_token_s - self.due_s

    @property
    def lag_s(self) -> float:
        """How late the client was in sending."""
        return 0.0 if self.sent_s is None else self.sent_s - self.due_s
