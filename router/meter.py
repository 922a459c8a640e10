"""The prefill meter: what a rank's events say of the prompts sent there, told to their tickets.

An engine stores blocks as it computes them. A prompt's last part that fills no block is never
stored; where it is short, it was computed in the step that stored the block before it.
"""

from __future__ import annotations

from cache_index.flights import Flight, Flights
from cache_index.types import SourceKey
from router.load import Ticket
from router.placement import Placement
from router.planning import Plan
from router.replicas import Replica

SHORT_TAIL_TOKENS = 128
"""A rest of at most so many tokens is taken to be computed with the last block before it."""


class PrefillMeter:
    """Registers prompts with the index while their tickets are out."""

    def __init__(self, flights: Flights, unit_tokens: int) -> None:
        self._flights = flights
        self._unit_tokens = unit_tokens

    def begin(self, plan: Plan, placement: Placement, ticket: Ticket) -> None:
        """Follow the prompt of a ticket that has been entered, if its tokens are known."""
        adapter, hashes = _chain(plan, placement.replica)
        if not hashes:
            return
        unit_tokens = self._unit_tokens
        prompt_tokens = placement.snapshot.prompt_tokens

        def stored(start: int, done: int, unit: int) -> None:
            left = prompt_tokens - done * unit_tokens
            ended = left < unit * unit_tokens and left <= SHORT_TAIL_TOKENS
            ticket.computed(prompt_tokens - start * unit_tokens, 0 if ended else left)

        key = SourceKey(placement.replica.name, placement.rank)
        matched = placement.matched_tokens // unit_tokens
        # An adapter's name does not say which weights it has; without it tokens say all.
        tokens = b"" if adapter else plan.prompt.token_ids or b""
        ticket.flight = Flight(key, hashes, matched, stored, tokens, plan.prompt.salt)
        self._flights.begin(ticket.flight)

    def end(self, ticket: Ticket) -> None:
        """The request has left its rank. Further calls do nothing."""
        flight, ticket.flight = ticket.flight, None
        if flight is not None:
            self._flights.end(flight)


def _chain(plan: Plan, replica: Replica) -> tuple[str, bytes]:
    """The adapter and the prompt's packed chain as this replica has it; empty if unknown."""
    served = replica.models.get(plan.model) if plan.chains and plan.model is not None else None
    if served is not None:
        for (base, adapter, _, _), chain in zip(plan.roots, plan.chains, strict=True):
            if base == served.base and adapter == served.adapter:
                return adapter, chain
    return "", b""
