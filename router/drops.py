"""Requests that replicas take and drop: how many replicas one may meet, and who is kept apart.

A replica that closes without a word may have died for reasons of its own, or of this very request.
Two deaths in a row are bad luck that no client should see; a request that three replicas did not
survive is stopped, whatever the reason, so that one that kills engines never takes more than
`MAX_CUTS` of them. The client is told not to repeat it. A second replica that closed but
whose health check is answered did not die: to go on from it costs the retry budget.

What dies takes everybody with it who waits there, again and again those who happen to be sent where
the one at fault is sent. So requests that were dropped twice are sent to replicas where no other
such request waits, as far as there are any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from router.budget import RetryBudget
from router.call import Call
from router.errors import NoReplica, RequestDropped, UpstreamError
from router.planning import Plan
from router.probe import ProbeFailed, ask
from router.replicas import Replica
from router.routes import Kind

MAX_CUTS = 3
"""A request that so many replicas have dropped is not carried through the rest of the fleet."""
SUSPECT_CUTS = 2
LIVES_S = 1.0


class Drops:
    """Of one gateway: the retry budget, and where suspects wait."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self._suspects: dict[Call, str] = {}

    def apart(self, replicas: Sequence[Replica]) -> Sequence[Replica]:
        """Those of `replicas` where the fewest suspects wait, for a request that was dropped."""
        if not self._suspects:
            return replicas
        waiting = Counter(self._suspects.values())
        fewest = min(waiting[each.name] for each in replicas)
        return [each for each in replicas if waiting[each.name] == fewest]

    def sent(self, call: Call, replica: Replica, cuts: int) -> None:
        """A request that was dropped before goes to this replica."""
        if cuts >= SUSPECT_CUTS:
            self._suspects[call] = replica.name

    def ended(self, call: Call) -> None:
        """It does not wait there any more."""
        self._suspects.pop(call, None)

    async def again(self, plan: Plan, replica: Replica, cuts: int) -> bool:
        """Whether a request that `replica` has dropped, as one of `cuts`, may go to another one."""
        if not plan.repeatable or cuts >= MAX_CUTS:
            return False
        return cuts == 1 or not await _lives(replica) or self._budget.retry()

    @staticmethod
    def error(call: Call, cuts: int, last: str) -> NoReplica | RequestDropped:
        """The answer to one that goes no further. A form was only passed on too far for that."""
        if cuts < MAX_CUTS and call.route.kind is Kind.UPLOAD and call.route.repeatable:
            return NoReplica(f"{last}; the form had been passed on already. Send it again.")
        return RequestDropped(cuts, last)


async def _lives(replica: Replica) -> bool:
    """Whether its health check says so: one that is just ending may still take a connection."""
    if not replica.ready:
        return False
    try:
        return (await ask(replica, "/health", LIVES_S)).status == 200
    except UpstreamError as error:
        replica.failed(str(error))
    except (TimeoutError, ProbeFailed):
        pass
    return False
