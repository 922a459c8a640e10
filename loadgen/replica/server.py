"""Puts N simulated replicas together in one process and takes them apart again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from loadgen.replica.api import ReplicaAPI
from loadgen.replica.engine import Engine
from loadgen.replica.generation import Generator
from loadgen.replica.http import HTTPServer
from loadgen.replica.model import EngineModel
from loadgen.replica.prompts import Served
from loadgen.replica.publisher import KVPublisher, ReplayFraming
from loadgen.replica.rank import RankRunner
from loadgen.replica.reply import build_vocabulary
from loadgen.replica.text import ReplicaTokenizer
from loadgen.replica.wire import BatchEncoder, EventEncoding, HashForm
from loadgen.tokenizer import default_folder


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Everything about the replicas of one process. Ports of 0 are free ones.

    With a base `port`, replica i listens on `port + i`.
    """

    replicas: int = 1
    ranks: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    model_name: str = "sim-model"
    adapters: tuple[str, ...] = ()
    tokenizer: Path = field(default_factory=default_folder)
    max_model_len_tokens: int = 32768
    engine: EngineModel = field(default_factory=EngineModel)
    events: EventEncoding = EventEncoding.MAP
    hash_form: HashForm = HashForm.INT
    replay_framing: ReplayFraming = ReplayFraming.NEW
    topic: str = ""
    buffer_steps: int = 10_000
    seed: int = 0


class Replica:
    """One replica that listens: its address and its ranks."""

    def __init__(self, server: HTTPServer, host: str, ranks: Sequence[RankRunner]) -> None:
        self.url = f"http://{host}:{server.port}"
        self.ranks = ranks
        self._server = server

    def describe(self) -> dict[str, Any]:
        """Its part of the start-up line."""
        addresses = [rank.publisher.address for rank in self.ranks]
        return {
            "url": self.url,
            "kv_events": [address.endpoint for address in addresses],
            "replay": [address.replay_endpoint for address in addresses],
        }

    async def close(self) -> None:
        """Stop serving, as if the process had died."""
        await self._server.close()
        for rank in self.ranks:
            await rank.close()


class Fleet:
    """All replicas of one process: `async with Fleet(config) as fleet`."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self.replicas: list[Replica] = []

    async def __aenter__(self) -> Fleet:
        config = self._config
        tokenizer = ReplicaTokenizer(config.tokenizer)
        vocabulary = build_vocabulary(tokenizer.encode, tokenizer.token_texts())
        length = min(config.max_model_len_tokens, config.engine.capacity_tokens)
        generator = Generator(tokenizer, vocabulary, length)
        context = zmq.Context[zmq.Socket[bytes]]()
        self._stack.callback(context.term)
        try:
            for number in range(config.replicas):
                self.replicas.append(await self._start(number, generator, context))
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    def describe(self) -> dict[str, Any]:
        """The start-up line's content."""
        return {"replicas": [replica.describe() for replica in self.replicas]}

    async def _start(
        self, number: int, generator: Generator, context: zmq.Context[zmq.Socket[bytes]]
    ) -> Replica:
        config = self._config
        ranks: list[RankRunner] = []
        for rank in range(config.ranks):
            runner = self._rank(rank, context)
            self._stack.push_async_callback(runner.close)
            runner.publisher.start()
            ranks.append(runner)
        served = Served(
            config.model_name, config.adapters, generator.max_model_len_tokens, int(time.time())
        )
        server = HTTPServer(ReplicaAPI(served, generator, config.engine, ranks).handle)
        self._stack.push_async_callback(server.close)
        await server.start(config.host, config.port and config.port + number)
        return Replica(server, config.host, ranks)

    def _rank(self, rank: int, context: zmq.Context[zmq.Socket[bytes]]) -> RankRunner:
        config = self._config
        publisher = KVPublisher(
            context,
            host=config.host,
            topic=config.topic,
            framing=config.replay_framing,
            buffer_steps=config.buffer_steps,
        )
        encoder = BatchEncoder(config.events, config.hash_form, rank)
        return RankRunner(Engine(config.engine, config.seed), encoder, publisher)
