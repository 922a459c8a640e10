"""A receipt as text: bounded, and nothing a client wrote is obeyed by a terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from cache_index.types import Holder
from router.call import Attempt
from router.policy import POLICIES, Candidate, Snapshot
from router.receipt import explanation, receipt
from router.receipt_text import MAX_ROWS, rendered
from router.receipts import Kept


@dataclass
class Made:
    """A request over a fleet of `ranks`, the last of which holds its prefix."""

    policy: str = "cost"
    ranks: int = 3
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def kept(self) -> Kept:
        candidates = tuple(
            Candidate(f"r{at}", 0, 96 * (at == self.ranks - 1), 0, 0.0, 0.005, 0.001, at)
            for at in range(self.ranks)
        )
        snapshot = Snapshot(130, candidates, 0, 0.0, 0.0001)
        given = dict.fromkeys(Kept._fields)
        usual = {
            "request_id": b"one",
            "ended_at_s": 1.8e9,
            "running": False,
            "method": "POST",
            "path": "/v1/completions",
            "model": "sim",
            "source": "given",
            "prompt_tokens": 130,
            "streaming": True,
            "reason": "",
            "on_trial": False,
            "roots": (("sim", "", 7, {Holder("r9", 0, "device"): 2, Holder("r0", 0, "host"): 4}),),
            "snapshot": snapshot,
            "choice": POLICIES[self.policy](snapshot),
            "attempts": (),
            "status": 200,
            "error_code": "",
            "routing_s": 0.001,
            "total_s": 1.5,
        }
        return Kept(**{**given, **usual, **self.fields})  # type: ignore[arg-type]

    def shown(self) -> str:
        return text(receipt(self.kept, self.policy, 16))


def text(told: dict[str, Any]) -> str:
    out = StringIO()
    Console(file=out, width=160).print(rendered(told))
    return out.getvalue()


def test_a_large_fleet_is_cut_with_the_chosen_on_top() -> None:
    rows = [line for line in Made(ranks=200).shown().splitlines() if "/0  " in line]
    assert len(rows) == MAX_ROWS
    assert rows[0].split()[:3] == ["->", "r199/0", "96"]
    assert f"and {200 - MAX_ROWS} more" in Made(ranks=200).shown()


@pytest.mark.parametrize("policy", POLICIES)
def test_scores_of_other_policies_have_a_column_and_a_meaning(policy: str) -> None:
    shown = Made(policy).shown()
    assert ("score:" in shown) == (policy != "cost")
    assert f"policy   {policy}, units of 16 tokens" in shown


def test_who_holds_a_prefix_without_credit_is_named() -> None:
    shown = Made().shown()
    assert "r9/0 32 tokens (no candidate)" in shown
    assert "r0/0 64 tokens (on its host: no credit)" in shown


def test_an_outcome_tells_attempts_times_and_reuse() -> None:
    kept = Made().kept
    assert kept.snapshot is not None and kept.choice is not None
    refused = Attempt(Snapshot(*kept.snapshot), kept.choice, False, "refused", "status 503")
    happened = {
        "attempts": (refused,),
        "first_byte_s": 0.2,
        "first_token_s": 0.1,
        "cached_tokens": 96,
        "engine_prompt_tokens": 130,
    }
    shown = Made(fields=happened).shown()
    assert "attempt 1  r2/0 refused: status 503" in shown
    assert "answered by r2/0, status 200, after 1 retry" in shown
    assert "first token 0.100 s after it was sent, predicted 0.039 s" in shown
    assert "96 of 130 tokens, says the engine; predicted 96" in shown
    assert "the engine did not say; predicted 96 tokens" in Made().shown()


def test_where_it_broke_off_is_not_who_answered() -> None:
    left = Made(fields={"status": 499, "first_byte_s": 0.2}).shown()
    assert "the client left, at r2/0, status 499" in left
    gone = {"status": 400, "error_code": "invalid_request", "model": None, "roots": ()}
    unread = {"snapshot": None, "choice": None, "source": "none", "prompt_tokens": 0}
    refused = Made(fields={**gone, **unread}).shown()
    assert "/v1/completions, no model named" in refused
    assert "none was looked at" in refused


def test_what_is_guessed_or_unusable_is_said() -> None:
    guessed = Made(fields={"source": "none", "roots": ()})
    assert "about 130 tokens, guessed: nothing can be matched" in guessed.shown()
    trust = {("r0", 0): "none", ("r1", 0): "exact"}
    shown = text(explanation(Made().kept, "cost", 16, {"r8": "draining"}, trust))
    assert "r0/0: trust in its KV events: none" in shown
    assert "r2/0: it publishes no KV events" in shown
    assert "r1/0:" not in shown
    assert "r8: draining" in shown


def test_control_characters_and_markup_are_shown_and_not_obeyed() -> None:
    shown = Made(fields={"path": "/v1/\x1b[31m\x07[bold]x[/bold]", "model": "\x9b2J"}).shown()
    assert "/v1/?[31m?[bold]x[/bold], model ?2J" in shown
