"""The requests that the doctor sends: few, short, with one token to generate, like nobody else's.

Each text begins with a nonce and each request has a salt of its own, so that nothing real is
reused and nothing that is cached for it can serve anybody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from router.doctor.asking import Asker, NoAnswer, Reply
from router.doctor.facts import Heard, Ids, Probe
from router.doctor.hearing import hear, unpack
from router.doctor.listening import Ears
from router.prompt import CHAT_PATH, COMPLETIONS_PATH
from router.templating import RenderError
from router.tokenizing import ModelTokenizer

MAX_RANKS = 8
"""Of one replica; more are not sent a request of their own."""
MIN_WORDS, MAX_WORDS = 64, 1100
DEFAULT_BLOCK_TOKENS = 64
HEARING_S = 2.0
"""How long after an answer its events may take: engines publish them with the step."""
RANK_HEADER = "x-data-parallel-rank"
WORDS = (
    *("the", "day", "was", "long", "and", "we", "went", "down", "to", "the", "old", "harbour"),
    *("where", "a", "boat", "lay", "in", "the", "sun"),
)


@dataclass(frozen=True, slots=True)
class Patient:
    """What is known of a replica when it is probed. `block_tokens` None: it does not say.

    `ranked`: a request must say which rank it is for.
    """

    model: str
    block_tokens: int | None
    ranks: Sequence[int]
    ranked: bool
    tokenizer: ModelTokenizer | None


class Prober:
    """Sends one replica its requests and puts together what came of them."""

    def __init__(self, asker: Asker, ears: Ears, patient: Patient, limit_s: float) -> None:
        self._asker = asker
        self._ears = ears
        self._patient = patient
        self._limit_s = limit_s
        self._text = _text(patient.block_tokens or DEFAULT_BLOCK_TOKENS)
        self._known: list[Ids] = []
        self._chat = True

    async def run(self) -> Probe:
        """Two times the same prompt, once under another salt, and one for each further rank."""
        try:
            return await self._run()
        except NoAnswer as error:
            return Probe(refused=str(error))

    async def _run(self) -> Probe:
        salt, other = uuid4().hex, uuid4().hex
        rank = self._patient.ranks[0]
        first = await self._send(salt, rank)
        if not first.ok and first.status in (400, 404, 405, 422, 501):
            self._chat = False  # a base model has no chat template
            first = await self._send(salt, rank)
        if not first.ok:
            return Probe(refused=first.complaint)
        self._learn(first)
        heard = [await self._hear(salt, rank)]
        answers = [first, await self._send(salt, rank), await self._send(other, rank)]
        # Once more: long prompts are told of in pieces, and what a pool has comes later.
        heard[0] = hear(self._ears.messages, rank, salt, self._known) or heard[0]
        if heard[0].salted:
            self._known.clear()  # the salt is enough, and tells these requests apart
        heard += [await self._elsewhere(each) for each in self._patient.ranks[1:MAX_RANKS]]
        cached = [_cached(each) for each in answers]
        return Probe(
            chat=self._chat,
            prompt_tokens=_usage(first).get("prompt_tokens") or 0,
            details=any(each is not None for each in cached),
            cached=(cached[0], cached[1], cached[2]),
            expected=self._expected(),
            heard=tuple(heard),
            unreadable=self._ears.unreadable,
        )

    async def _send(self, salt: str, rank: int) -> Reply:
        fields: dict[str, Any] = {
            "model": self._patient.model,
            "max_tokens": 1,
            "temperature": 0,
            "cache_salt": salt,
            "return_token_ids": True,
        }
        headers = {"x-request-id": f"kvroute-doctor-{uuid4().hex}"}
        if self._patient.ranked:
            headers[RANK_HEADER] = str(rank)
        path = CHAT_PATH if self._chat else COMPLETIONS_PATH
        given = self._message() if self._chat else {"prompt": self._text}
        return await self._asker.post(path, {**fields, **given}, headers, self._limit_s)

    async def _elsewhere(self, rank: int) -> Heard:
        salt = uuid4().hex
        self._ears.messages.clear()
        answer = await self._send(salt, rank)
        return await self._hear(salt, rank) if answer.ok else Heard(rank=rank)

    async def _hear(self, salt: str, rank: int) -> Heard:
        """What the publishers say of the request, as soon as one does, or after a while."""
        if not any(each.connected for each in self._ears.publishers):
            return Heard(rank=rank)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + HEARING_S
        while True:
            self._ears.news.clear()
            heard = hear(self._ears.messages, rank, salt, self._known)
            if heard is not None:
                return heard
            try:
                async with asyncio.timeout_at(until_s):
                    await self._ears.news.wait()
            except TimeoutError:
                return Heard(rank=rank)

    def _message(self) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": self._text}]}

    def _expected(self) -> Ids | None:
        """The prompt's ids by our own tokenizer."""
        tokenizer = self._patient.tokenizer
        if tokenizer is None:
            return None
        try:
            return unpack(
                tokenizer.chat(self._message()) if self._chat else tokenizer.text(self._text)
            )
        except RenderError:
            return None

    def _learn(self, answer: Reply) -> None:
        """The prompt's ids, so that its events are known where they do not tell the salt."""
        body = answer.json if isinstance(answer.json, dict) else {}
        choices = body.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else {}
        for given in (body, choice if isinstance(choice, dict) else {}):
            ids = given.get("prompt_token_ids")
            if isinstance(ids, list) and all(type(each) is int for each in ids):
                self._known.append(tuple(ids))
        expected = self._expected()
        if expected is not None:
            self._known.append(expected)


def probable(block_tokens: int | None) -> bool:
    """Whether a short prompt fills a block at all: hybrid models have blocks of 1,000s."""
    return (block_tokens or DEFAULT_BLOCK_TOKENS) + 8 <= MAX_WORDS


def _text(block_tokens: int) -> str:
    """A nonce and words for two blocks: no tokenizer makes less than one token of a word."""
    count = min(max(MIN_WORDS, 2 * block_tokens + 8), MAX_WORDS)
    words = (WORDS * (count // len(WORDS) + 1))[:count]
    return f"{uuid4().hex} {' '.join(words)}"


def _usage(answer: Reply) -> dict[str, Any]:
    body = answer.json
    usage = body.get("usage") if isinstance(body, dict) else None
    return usage if isinstance(usage, dict) else {}


def _cached(answer: Reply) -> int | None:
    details = _usage(answer).get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None
