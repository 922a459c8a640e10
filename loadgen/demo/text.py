"""The simulated model's own view of text, so that a plan has the same tokens as the real run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadgen.replica.hashing import chain, root_hash
from loadgen.replica.reply import build_vocabulary, reply_tokens
from loadgen.replica.text import ReplicaTokenizer
from loadgen.workload.model import Chat, Completion


class ModelText:
    """Prompts and replies of the simulated model whose tokenizer is in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = ReplicaTokenizer(folder)
        self._vocabulary = build_vocabulary(self._tokenizer.encode, self._tokenizer.token_texts())

    def prompt_ids(self, request: Chat | Completion) -> list[int]:
        """Token ids of the prompt, after the chat template where one applies."""
        if isinstance(request, Completion):
            return self._tokenizer.encode(request.prompt)
        messages = [{"role": role, "content": content} for role, content in request.messages]
        return self._tokenizer.encode(self._tokenizer.render(messages))

    def reply_ids(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        return reply_tokens(prompt_ids, max_tokens, self._vocabulary)

    def reply_text(self, reply_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(reply_ids)


def block_hashes(token_ids: Sequence[int], block_tokens: int) -> list[int]:
    """Chained hashes of full blocks, the same as those of an engine with seed 0."""
    return chain(root_hash(0, "", ""), token_ids, block_tokens)
