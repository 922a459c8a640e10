"""Samples: what one request will generate, worked out before the engine sees it.

Replies depend on the prompt alone, so their text, the place of a stop string and the reason
to finish are known in advance; the engine decides only when each token comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loadgen.replica.errors import InvalidValue, RequestRefused
from loadgen.replica.reply import Vocabulary, natural_length_tokens, reply_tokens
from loadgen.replica.requests import GenerationFields
from loadgen.replica.text import Detokenizer, ReplicaTokenizer


@dataclass(frozen=True, slots=True)
class Sample:
    """One choice of an answer. `pieces[i]` is the text that token i lets out, perhaps ""."""

    index: int
    prompt_ids: Sequence[int]
    ids: list[int]
    pieces: list[str]
    finish_reason: str
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """The whole reply."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Generator:
    """Plans the replies of one model."""

    tokenizer: ReplicaTokenizer
    vocabulary: Vocabulary
    max_model_len_tokens: int

    def samples(
        self,
        prompts: Sequence[Sequence[int]],
        request: GenerationFields,
        forced: str | None = None,
    ) -> list[Sample]:
        """`n` samples for each prompt; `forced` is the text of all of them, where there is one.

        Raises RequestRefused for prompts that do not fit.
        """
        count = request.n or 1
        if forced is not None:
            return [self._forced(i, prompts[0], request, forced) for i in range(count)]
        return [
            self._sample(place * count + variant, prompt, variant, request)
            for place, prompt in enumerate(prompts)
            for variant in range(count)
        ]

    def _sample(
        self, index: int, prompt: Sequence[int], variant: int, request: GenerationFields
    ) -> Sample:
        limit = self._limit(prompt, request.limit())
        natural = request.limit() is None and not request.ignore_eos
        length = limit
        if natural:
            wanted = max(natural_length_tokens(prompt, variant), request.min_tokens or 0)
            length = min(limit, wanted)
        ids = reply_tokens(prompt, length, self.vocabulary, variant)
        eos = self.tokenizer.eos_id
        ends = natural and length < limit
        if ends and eos is not None:
            ids.append(eos)
        reason = "stop" if ends else "length"
        stop_token = _cut_at_stop_token(ids, request.stop_token_ids or ())
        if stop_token is not None:
            reason = "stop"
        pieces = self._pieces(ids, request.skip_special_tokens)
        if stop_token is not None and not request.include_stop_str_in_output:
            pieces[-1] = ""
        sample = Sample(index, prompt, ids, pieces, reason, stop_token)
        stops = request.stops()
        return _stopped(sample, stops, request.include_stop_str_in_output) if stops else sample

    def _forced(
        self, index: int, prompt: Sequence[int], request: GenerationFields, text: str
    ) -> Sample:
        limit = self._limit(prompt, request.limit())
        eos = [] if self.tokenizer.eos_id is None else [self.tokenizer.eos_id]
        whole = [*self.tokenizer.encode(text), *eos]
        ids = whole[:limit]
        reason = "stop" if len(ids) == len(whole) else "length"
        return Sample(index, prompt, ids, self._pieces(ids, skip_special=True), reason)

    def _limit(self, prompt: Sequence[int], wanted: int | None) -> int:
        """Tokens that may be generated after this prompt."""
        room = self.max_model_len_tokens - len(prompt)
        if not prompt:
            raise RequestRefused("The decoder prompt cannot be empty")
        if wanted is not None and wanted > self.max_model_len_tokens:
            raise InvalidValue(
                f"max_tokens={wanted} cannot be greater than "
                f"max_model_len={self.max_model_len_tokens}. Please request fewer output tokens.",
                "max_tokens",
                wanted,
            )
        if room <= 0:
            raise InvalidValue("max_tokens must be at least 1, got 0.", "max_tokens", 0)
        # 0 is for the prompt alone: one token is generated, and not shown. More than there is
        # room for is no error, the reply ends where the context does.
        return room if wanted is None else min(wanted, room) or 1

    def _pieces(self, ids: Sequence[int], skip_special: bool) -> list[str]:
        detokenizer = Detokenizer(self.tokenizer, skip_special=skip_special)
        last = len(ids) - 1
        return [detokenizer.push(token, final=i == last) for i, token in enumerate(ids)]


def _cut_at_stop_token(ids: list[int], stops: Sequence[int]) -> int | None:
    """Shorten `ids` to end with the first stop token, which is returned."""
    for place, token in enumerate(ids if stops else ()):
        if token in stops:
            del ids[place + 1 :]
            return token
    return None


def _stopped(sample: Sample, stops: Sequence[str], include: bool) -> Sample:
    """The sample cut at the first stop string.

    Text that could be the beginning of a stop string is held back until it is not.
    """
    hold = 0 if include else max(len(text) for text in stops) - 1
    seen = ""
    shown = 0
    pieces: list[str] = []
    for place, piece in enumerate(sample.pieces):
        searched = max(0, len(seen) - max(len(text) for text in stops) + 1)
        seen += piece
        match = _first_stop(seen, stops, searched)
        if match is not None:
            start, text = match
            end = start + len(text) if include else start
            pieces.append(seen[shown:end])
            ids = sample.ids[: place + 1]
            return replace(sample, ids=ids, pieces=pieces, finish_reason="stop", stop_reason=text)
        ready = max(shown, len(seen) - hold)
        pieces.append(seen[shown:ready])
        shown = ready
    if pieces:
        pieces[-1] += seen[shown:]
    return replace(sample, pieces=pieces)


def _first_stop(text: str, stops: Sequence[str], start: int) -> tuple[int, str] | None:
    found = [(place, stop) for stop in stops if (place := text.find(stop, start)) >= 0]
    return min(found, default=None)
