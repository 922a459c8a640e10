"""Invented but well-formed log probabilities: fixed by the token, the chosen one on top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadgen.replica.text import ReplicaTokenizer

_STEP = 2654435761


def chat_logprobs(tokenizer: ReplicaTokenizer, ids: Sequence[int], top: int) -> dict[str, Any]:
    """`logprobs` of a chat choice: one entry per token, with `top` alternatives."""
    return {"content": [_chat_entry(tokenizer, token, top) for token in ids]}


def completion_logprobs(
    tokenizer: ReplicaTokenizer,
    ids: Sequence[int],
    top: int,
    offset_chars: int,
    prompt_ids: Sequence[int] = (),
) -> dict[str, Any]:
    """`logprobs` of a completion choice; offsets count characters from `offset_chars`.

    `prompt_ids` are those of a prompt that is sent back before the reply; nothing is known of
    its first token.
    """
    listed = [*prompt_ids, *ids]
    texts = [_text(tokenizer, token) for token in listed]
    offsets: list[int] = []
    for text in texts:
        offsets.append(offset_chars)
        offset_chars += len(text)
    unknown: list[None] = [None] * bool(prompt_ids)
    known = listed[len(unknown) :]
    return {
        "text_offset": offsets,
        "token_logprobs": [*unknown, *(_logprob(token, 0) for token in known)],
        "tokens": texts,
        "top_logprobs": [*unknown, *(_ranked_texts(tokenizer, token, top) for token in known)],
    }


def prompt_logprobs(
    tokenizer: ReplicaTokenizer, ids: Sequence[int], top: int | None
) -> list[Any] | None:
    """`prompt_logprobs`: for each token of the prompt but the first, it and what is likelier."""
    if top is None:
        return None
    return [None, *(_prompt_entry(tokenizer, token, top) for token in ids[1:])]


def _prompt_entry(tokenizer: ReplicaTokenizer, token: int, top: int) -> dict[str, Any]:
    return {
        str(other): {
            "logprob": value,
            "rank": place + 1,
            "decoded_token": _text(tokenizer, other),
        }
        for place, (other, value) in enumerate(_ranked(tokenizer, token, top))
    }


def _chat_entry(tokenizer: ReplicaTokenizer, token: int, top: int) -> dict[str, Any]:
    entry = _token_entry(tokenizer, token, _logprob(token, 0))
    ranked = _ranked(tokenizer, token, top) if top else []
    return {**entry, "top_logprobs": [_token_entry(tokenizer, *pair) for pair in ranked]}


def _token_entry(tokenizer: ReplicaTokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": _text(tokenizer, token), "logprob": logprob, "bytes": list(raw)}


def _ranked_texts(tokenizer: ReplicaTokenizer, token: int, top: int) -> dict[str, float]:
    return {_text(tokenizer, other): value for other, value in _ranked(tokenizer, token, top)}


def _ranked(tokenizer: ReplicaTokenizer, token: int, top: int) -> list[tuple[int, float]]:
    """The chosen token and, behind it, others with ever smaller probability."""
    others = ((token + place * _STEP) % tokenizer.size for place in range(max(1, top)))
    return [(other, _logprob(token, place)) for place, other in enumerate(others)]


def _logprob(token: int, place: int) -> float:
    return round(-0.01 - (token * _STEP % 997) / 4000 - 1.7 * place, 6)


def _text(tokenizer: ReplicaTokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode(errors="replace")
