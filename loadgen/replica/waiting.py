"""A request inside the engine, and the queue of those that wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from loadgen.replica.model import EngineRequest

_SLACK = 64


class Run:
    """Scheduling state of one request. Changed by the engine only.

    `computed` counts tokens whose KV exists; `emitted` counts tokens sent, up to the decode
    round in which the run joined (`joined_round`); `stored` counts blocks with known content.
    """

    __slots__ = (
        "admitted_s",
        "arrived_s",
        "blocks",
        "cached",
        "computed",
        "due_round",
        "emitted",
        "gone",
        "hashes",
        "joined_round",
        "order",
        "request",
        "root",
        "seq",
        "started",
        "stored",
        "target",
        "tokens",
        "waits",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        seq: int,
        priority: int,
        arrived_s: float,
        root: int,
        hashes: list[int],
    ) -> None:
        self.request = request
        self.seq = seq
        self.order: tuple[int, int] = (priority, seq)
        self.arrived_s = arrived_s
        self.admitted_s = arrived_s
        self.root = root
        self.hashes = hashes
        self.tokens: Sequence[int] = request.prompt_ids
        self.target = len(request.prompt_ids)
        self.blocks: list[int] = []
        self.cached = -1
        self.computed = 0
        self.stored = 0
        self.emitted = 0
        self.joined_round = 0
        self.due_round = 0
        self.started = False
        self.waits = False
        self.gone = False


class WaitingQueue:
    """Runs by (priority, arrival); leaving from the middle is cheap.

    A preempted run comes back with its old arrival number and so goes to the front, which is
    what vLLM does.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Run]] = []
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Run]:
        return (run for _, run in self._heap if not run.gone)

    def push(self, run: Run) -> None:
        """Let a run wait."""
        run.waits = True
        heappush(self._heap, (run.order, run))
        self._waiting += 1

    def peek(self) -> Run:
        """The run that is next; the queue must not be empty."""
        while self._heap[0][1].gone:
            heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Run:
        """Take the run that is next."""
        run = self.peek()
        heappop(self._heap)
        run.waits = False
        self._waiting -= 1
        return run

    def discard(self, run: Run) -> None:
        """Forget an aborted run that waits here."""
        run.gone = True
        run.waits = False
        self._waiting -= 1
        if len(self._heap) > 2 * self._waiting + _SLACK:
            self._heap = [entry for entry in self._heap if not entry[1].gone]
            heapify(self._heap)
