"""Follows one source whose publisher dials our bound socket: which connection, and which life.

There is no telling from here when such a publisher connects: it is known by its first message. So a
message over another connection than the last one is a reconnect, with all that follows (see
`SourceState.connected`): without a replay endpoint everything known is dropped. What a connection
that has ended still had in the queue is not taken once another has spoken. Two connections that are
open and have both spoken under one topic are two publishers, or one that is half gone: nothing is
believed until one of them is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import zmq

from cache_index.door import Spoken
from cache_index.draining import RawSocket
from cache_index.intake import Intake
from cache_index.ledger import Operation
from cache_index.replaying import Replayer
from cache_index.sockets import told_trouble
from cache_index.source import SourceState
from cache_index.tasks import for_ever
from cache_index.types import SourceSpec

__all__ = ["DialedSource"]

_log = logging.getLogger(__name__)
_MAX_CONNECTIONS = 16


class DialedSource:
    """Feeds a SourceState from what a listener hears under its topic."""

    def __init__(
        self,
        spec: SourceSpec,
        state: SourceState,
        context: zmq.Context[RawSocket],
        take: Callable[[Sequence[Operation]], None],
        *,
        lease_s: float,
    ) -> None:
        self._spec = spec
        self.intake = Intake(state, take)
        self._replayer = Replayer(spec.replay_endpoint, self.intake, context, lease_s)
        self._current = 0
        self._speaking: dict[int, str] = {}
        self.error = ""

    async def run(self) -> None:
        """Keep the source current for ever."""
        await for_ever(self._replayer.run, self._failed)

    def _failed(self, error: Exception) -> None:
        self.error = told_trouble(self._spec.key, self._spec.replay_endpoint, error)

    def heard(self, spoken: Spoken, *, alive: bool) -> None:
        """A message under this source's topic; `alive` unless its connection has ended since."""
        connection = spoken.connection
        if not alive and connection != self._current:
            self.intake.counts["late"] += 1
            return
        if alive and connection not in self._speaking:
            self._speaks(connection, spoken.peer)
        if len(self._speaking) > 1:
            self.intake.counts["conflict"] += 1
            return
        if connection != self._current:
            self._current = connection
            self.intake.connected()
        self.intake.live(spoken.frames)

    def lost(self, connection: int) -> None:
        """A connection has ended."""
        if self._speaking.pop(connection, None) is None:
            return
        if connection == self._current:
            self.intake.state.disconnected()
        if len(self._speaking) <= 1 and self.intake.state.standing.conflict:
            self.intake.state.standing.conflict = ""
            # Whoever is left has been passed over for a while.
            self._current = 0

    def lost_all(self) -> None:
        """The listener's socket is gone."""
        for connection in list(self._speaking):
            self.lost(connection)

    def _speaks(self, connection: int, peer: str) -> None:
        if len(self._speaking) < _MAX_CONNECTIONS:
            self._speaking[connection] = peer
        if len(self._speaking) > 1:
            peers = " and ".join(sorted(set(self._speaking.values())))
            count = len(self._speaking)
            self.intake.state.standing.conflict = (
                f"{count} publishers send under its topic (from {peers})"
            )
            self.intake.void("several publishers sent under its topic")
