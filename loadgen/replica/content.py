"""What the blocks of a run hold: its tokens, their hashes, and the events that say so."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.replica.events import BlocksStored
from loadgen.replica.hashing import chain, root_hash
from loadgen.replica.model import EngineRequest
from loadgen.replica.reply import Vocabulary, reply_tokens
from loadgen.replica.waiting import Run


class BlockContent:
    """Hashes of one engine, all from one seed. Replies are worked out when a block needs them."""

    def __init__(
        self,
        block_size_tokens: int,
        seed: int,
        vocabulary: Vocabulary,
        *,
        ignore_salts: bool = False,
    ) -> None:
        self._size = block_size_tokens
        self._ignore_salts = ignore_salts
        self._seed = seed
        self._vocabulary = vocabulary

    def prompt_hashes(self, prompt_ids: Sequence[int], salt: str, adapter: str) -> list[int]:
        """One hash per full block of a prompt."""
        return chain(self.root(salt, adapter), prompt_ids, self._size)

    def root(self, salt: str, adapter: str) -> int:
        """What the chain of a prompt starts from."""
        return root_hash(self._seed, salt, adapter)

    def extend(self, run: Run, blocks: int) -> None:
        """Make `run.hashes` cover its first `blocks` blocks, prompt and reply."""
        known = len(run.hashes)
        if known >= blocks:
            return
        request = run.request
        if run.tokens is request.prompt_ids:
            run.tokens = [*request.prompt_ids, *self._reply(request)]
        parent = run.hashes[-1] if known else run.root
        tokens = run.tokens[known * self._size : blocks * self._size]
        run.hashes += chain(parent, tokens, self._size)

    def stored(self, run: Run, start: int, end: int) -> BlocksStored:
        """The event for blocks `start` to `end` of a run."""
        return BlocksStored(
            hashes=run.hashes[start:end],
            parent=run.hashes[start - 1] if start else None,
            token_ids=run.tokens[start * self._size : end * self._size],
            block_size_tokens=self._size,
            salt="" if self._ignore_salts else run.request.salt,
            adapter=run.request.adapter,
            session_id=run.request.session_id,
        )

    def _reply(self, request: EngineRequest) -> Sequence[int]:
        if request.reply_ids is not None:
            return request.reply_ids
        return reply_tokens(request.prompt_ids, request.max_tokens, self._vocabulary)
