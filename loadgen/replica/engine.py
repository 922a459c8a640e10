"""The engine core: continuous batching over a prefix-cached block pool, in virtual time.

No clock, no I/O. The caller asks for one step at a time and lets the step's duration pass
before it asks for the next. As in vLLM: requests that run go first, one of them at most is
part-way through its prompt, waiting ones join while the token budget lasts, and a request
that finds no block for its next token makes the last admitted one (or, under the priority
policy, the least urgent) start over.

Decoding is kept as a count of rounds: a decoding request costs nothing in a round unless it
needs a block, fills one or ends, so a step is cheap however large its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

from loadgen.replica.blocks import BlockPool
from loadgen.replica.content import BlockContent
from loadgen.replica.errors import DuplicateRequest, EngineError, RequestTooLong
from loadgen.replica.events import BlockRemoved, BlocksCleared, KVEvent
from loadgen.replica.model import (
    EngineModel,
    EngineRequest,
    EngineStats,
    FirstToken,
    SchedulingPolicy,
    StepResult,
)
from loadgen.replica.reply import Vocabulary, reply_tokens
from loadgen.replica.waiting import Run, WaitingQueue

__all__ = [
    "Engine",
    "EngineModel",
    "EngineRequest",
    "EngineStats",
    "FirstToken",
    "SchedulingPolicy",
    "StepResult",
    "Vocabulary",
    "reply_tokens",
]


def _order(run: Run) -> tuple[int, int]:
    return run.order


class Engine:
    """One rank. `seed` starts its hash chains; `record_events=False` saves their cost."""

    def __init__(
        self,
        model: EngineModel,
        seed: int = 0,
        *,
        vocabulary: Vocabulary | None = None,
        record_events: bool = True,
    ) -> None:
        self.model = model
        self.stats = EngineStats()
        self._content = BlockContent(
            model.block_size_tokens,
            seed,
            vocabulary or Vocabulary.numbers(),
            ignore_salts=model.ignore_salts,
        )
        self._record_events = record_events
        self._events: list[KVEvent] = []
        self._pool = BlockPool(model.blocks, self._block_removed)
        self._runs: dict[str, Run] = {}
        self._waiting = WaitingQueue()
        self._partial: Run | None = None
        self._decoding: dict[str, Run] = {}
        self._round = 0
        self._due: dict[int, list[Run]] = {}
        self._arrivals = 0
        # True while the head of the queue is known not to fit and nothing has changed since.
        self._head_blocked = False

    @property
    def running(self) -> int:
        """Requests that hold a place in the batch."""
        return len(self._decoding) + (self._partial is not None)

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    @property
    def used_blocks(self) -> int:
        """Blocks that requests in the batch use."""
        return self._pool.used

    @property
    def kv_usage(self) -> float:
        """Fraction of the blocks in use, 0 to 1."""
        return self._pool.used / self.model.blocks

    @property
    def cached_hashes(self) -> frozenset[int]:
        """Content hashes that a lookup can find now."""
        return self._pool.hashes

    def hashes(self, prompt_ids: Sequence[int], salt: str = "", adapter: str = "") -> list[int]:
        """Block hashes of a prompt, one per full block; equal for engines of equal seed."""
        return self._content.prompt_hashes(prompt_ids, salt, adapter)

    def cached_tokens(self, prompt_ids: Sequence[int], salt: str = "", adapter: str = "") -> int:
        """Tokens of this prompt that a request would reuse if it were admitted now."""
        return self.cached_prefix_tokens(self.hashes(prompt_ids, salt, adapter), len(prompt_ids))

    def cached_prefix_tokens(self, hashes: Sequence[int], prompt_tokens: int) -> int:
        """`cached_tokens` of a prompt whose hashes are known."""
        return len(self._cached_blocks(hashes, prompt_tokens)) * self.model.block_size_tokens

    def queued_uncached_tokens(self) -> int:
        """Prompt tokens still to be computed: of those waiting, and of the one under way."""
        queued = sum(
            run.target - self.cached_prefix_tokens(run.hashes, run.target) for run in self._waiting
        )
        partial = self._partial
        return queued + (partial.target - partial.computed if partial else 0)

    def add(self, request: EngineRequest, now_s: float) -> None:
        """Let a request wait; it is looked at by the next step.

        Raises RequestTooLong where the block cache could never hold it, DuplicateRequest for
        an id in flight.
        """
        if request.id in self._runs:
            raise DuplicateRequest(request.id)
        if request.max_tokens < 1 or not request.prompt_ids:
            raise EngineError("a request needs a prompt and at least one token to generate")
        total = len(request.prompt_ids) + request.max_tokens
        if total > self.model.capacity_tokens:
            raise RequestTooLong(f"{total} tokens, the cache holds {self.model.capacity_tokens}")
        run = self._new_run(request, now_s)
        self._runs[request.id] = run
        self._waiting.push(run)
        if self._waiting.peek() is run:
            self._head_blocked = False

    def abort(self, request_id: str) -> None:
        """Drop a request wherever it is; unknown ids are ignored."""
        run = self._runs.get(request_id)
        if run is None:
            return
        if run.waits:
            self._waiting.discard(run)
            del self._runs[request_id]
            self._head_blocked = False
        else:
            self._leave(run)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False while requests hold blocks.

        The event waits for the next step, as it does in vLLM.
        """
        if not self._pool.reset():
            return False
        self._head_blocked = False
        self._report(BlocksCleared())
        return True

    def step(self, now_s: float, until_s: float | None = None) -> StepResult | None:
        """Run one step that starts at `now_s`; None when there is nothing to do.

        With `until_s` (the next arrival, or inf), decode rounds in which nothing else happens
        are taken together: as many as start before it.
        """
        if not self._runs:
            return None
        result = StepResult(now_s)
        if until_s is not None and self._only_decodes():
            result.rounds = self._quiet_rounds(until_s - now_s)
            self._round += result.rounds - 1
        self._grow(result)
        batch = len(self._decoding)
        self._decode(result)
        result.duration_s = result.rounds * self.model.decode_s(batch)
        self._prefill(result, self.model.max_batched_tokens - batch)
        # Who ends in a step leaves with its tokens: its place and its blocks serve the next.
        for request_id in result.finished:
            self._leave(self._runs[request_id])
        result.events, self._events = self._events, []
        return result

    # Decoding

    def _only_decodes(self) -> bool:
        if self._partial is not None or not self._decoding:
            return False
        if not self._waiting:
            return True
        return self._head_blocked or len(self._decoding) >= self.model.max_num_seqs

    def _quiet_rounds(self, horizon_s: float) -> int:
        """Rounds up to the first that ends a block or a request, or to the horizon.

        A round that needs a new block follows one that filled the block before it, so it is
        never inside of such a stretch, only at its beginning.
        """
        rounds = 1
        while self._round + rounds not in self._due:
            rounds += 1
        each_s = self.model.decode_s(len(self._decoding))
        if horizon_s == inf or each_s <= 0:
            return rounds
        return max(1, min(rounds, ceil(horizon_s / each_s)))

    def _grow(self, result: StepResult) -> None:
        """Give decoding requests the blocks that this round's tokens need."""
        for run in self._due.get(self._round + 1, ()):
            if run.gone or run.waits or run.due_round != self._round + 1:
                continue
            if self._computed(run) >= len(run.blocks) * self.model.block_size_tokens:
                self._take_or_preempt(run, 1, result)

    def _decode(self, result: StepResult) -> None:
        if not self._decoding:
            return
        self._round += 1
        result.emitted = dict.fromkeys(self._decoding, result.rounds)
        self.stats.generated += len(self._decoding) * result.rounds
        for run in self._due.pop(self._round, ()):
            if run.gone or run.waits or run.due_round != self._round:
                continue
            # A run that was preempted and came back can be listed twice.
            if run.joined_round == self._round:
                continue
            run.computed = self._computed(run)
            run.emitted += self._round - run.joined_round
            run.joined_round = self._round
            self._store_full(run)
            if run.emitted >= run.request.max_tokens:
                result.finished.append(run.request.id)
            else:
                self._plan(run)

    def _computed(self, run: Run) -> int:
        return run.computed + self._round - run.joined_round

    def _plan(self, run: Run) -> None:
        """Note the next round in which the run needs a block, fills one or ends."""
        size = self.model.block_size_tokens
        to_boundary = -run.computed % size
        to_end = run.request.max_tokens - run.emitted
        # At a boundary the next round needs a block (and fills it, if blocks hold one token).
        run.due_round = run.joined_round + min(to_boundary or 1, to_end)
        self._due.setdefault(run.due_round, []).append(run)

    # Prefill

    def _prefill(self, result: StepResult, budget: int) -> None:
        partial = self._partial
        if partial is not None:
            budget -= self._advance(partial, budget, result)
        if result.preempted or self._head_blocked:
            return
        while budget > 0 and self._waiting and self.running < self.model.max_num_seqs:
            run = self._admit(result.start_s)
            if run is None:
                self._head_blocked = True
                return
            budget -= self._advance(run, budget, result)

    def _admit(self, now_s: float) -> Run | None:
        """Take the head of the queue into the batch if its whole prompt fits."""
        run = self._waiting.peek()
        size = self.model.block_size_tokens
        hits = self._cached_blocks(run.hashes, run.target)
        needed = -(-run.target // size) - len(hits)
        if needed > self._pool.free - self._pool.idle(hits):
            return None
        self._waiting.pop()
        self._pool.touch(hits)
        run.blocks = hits
        run.stored = len(hits)
        run.computed = len(hits) * size
        run.started = False
        self._partial = run
        self.stats.queries += run.target
        self.stats.hits += run.computed
        if run.cached < 0:
            run.cached = run.computed
            run.admitted_s = now_s
            self.stats.cached += run.computed
            self.stats.prompt += run.target
        return run

    def _advance(self, run: Run, budget: int, result: StepResult) -> int:
        """Compute the next chunk of a prompt; the tokens it took from the budget."""
        tokens = min(run.target - run.computed, budget)
        if tokens <= 0:
            return 0
        needed = -(-(run.computed + tokens) // self.model.block_size_tokens) - len(run.blocks)
        if needed > 0 and not self._take_or_preempt(run, needed, result):
            return 0
        first = not run.started
        result.duration_s += self.model.prefill_s(tokens, run.computed, first=first)
        result.prefilled_tokens += tokens
        self.stats.computed += tokens
        run.started = True
        run.computed += tokens
        self._store_full(run)
        if run.computed == run.target:
            self._finish_prefill(run, result)
        return tokens

    def _finish_prefill(self, run: Run, result: StepResult) -> None:
        self._partial = None
        request_id = run.request.id
        result.emitted[request_id] = 1
        self.stats.generated += 1
        run.emitted += 1
        if run.emitted == 1:
            size = self.model.block_size_tokens
            created = (run.target // size * size - run.cached) * self.model.prefix_caching
            first = FirstToken(run.cached, run.arrived_s, run.admitted_s, created)
            result.first[request_id] = first
        self._decoding[request_id] = run
        run.joined_round = self._round
        if run.emitted >= run.request.max_tokens:
            result.finished.append(request_id)
        else:
            self._plan(run)

    # Blocks

    def _cached_blocks(self, hashes: Sequence[int], tokens: int) -> list[int]:
        """Blocks that a prompt of so many tokens can reuse now."""
        if not self.model.prefix_caching:
            return []
        # The last token is always computed: its logits are what the first new token is.
        return self._pool.find(hashes, max(0, tokens - 1) // self.model.block_size_tokens)

    def _take_or_preempt(self, run: Run, count: int, result: StepResult) -> bool:
        """Get blocks for `run`, at others' cost if need be; False if `run` itself had to go."""
        while self._pool.free < count:
            victim = self._victim()
            self._preempt(victim, result)
            if victim is run:
                return False
        run.blocks += self._pool.take(count)
        return True

    def _victim(self) -> Run:
        if self.model.policy is SchedulingPolicy.FCFS:
            return self._partial or self._decoding[next(reversed(self._decoding))]
        candidates = [
            run for run in self._decoding.values() if run.emitted < run.request.max_tokens
        ]
        if self._partial is not None:
            candidates.append(self._partial)
        return max(candidates, key=_order)

    def _preempt(self, run: Run, result: StepResult) -> None:
        if run is self._partial:
            self._partial = None
        else:
            run.emitted += self._round - run.joined_round
            del self._decoding[run.request.id]
        self._pool.give_back(run.blocks)
        run.blocks = []
        run.computed = run.stored = 0
        # What was planned for it in a later round must not reach it while it prefills again.
        run.due_round = -1
        run.target = len(run.request.prompt_ids) + run.emitted
        self._content.extend(run, run.target // self.model.block_size_tokens)
        self._waiting.push(run)
        self._head_blocked = False
        self.stats.preemptions_total += 1
        result.preempted.append(run.request.id)

    def _leave(self, run: Run) -> None:
        run.gone = True
        if run is self._partial:
            self._partial = None
        self._decoding.pop(run.request.id, None)
        self._pool.give_back(run.blocks)
        del self._runs[run.request.id]
        self._head_blocked = False

    def _store_full(self, run: Run) -> None:
        """Make the blocks that have become full reusable, and report them."""
        full = run.computed // self.model.block_size_tokens
        if full <= run.stored or not self.model.prefix_caching:
            return
        self._content.extend(run, full)
        start, run.stored = run.stored, full
        self._pool.store(run.blocks[start:full], run.hashes[start:full])
        if self._record_events:
            self._events.append(self._content.stored(run, start, full))

    # Small things

    def _new_run(self, request: EngineRequest, now_s: float) -> Run:
        salt = "" if self.model.ignore_salts else request.salt
        adapter = request.adapter
        known = request.hashes
        if known is None:
            known = self._content.prompt_hashes(request.prompt_ids, salt, adapter)
        self._arrivals += 1
        by_priority = self.model.policy is SchedulingPolicy.PRIORITY
        return Run(
            request,
            seq=self._arrivals,
            priority=request.priority if by_priority else 0,
            arrived_s=now_s,
            root=self._content.root(salt, adapter),
            hashes=list(known),
        )

    def _block_removed(self, block_hash: int) -> None:
        self._report(BlockRemoved(block_hash))

    def _report(self, event: KVEvent) -> None:
        if self._record_events:
            self._events.append(event)
