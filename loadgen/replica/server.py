"""Puts N simulated replicas together in one process and takes them apart again."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import zmq

from loadgen.replica.api import Flavor, ReplicaAPI
from loadgen.replica.clock import Clock
from loadgen.replica.engine import Engine
from loadgen.replica.faults import FaultPlan
from loadgen.replica.generation import Generator
from loadgen.replica.http import HTTPServer
from loadgen.replica.model import EngineModel
from loadgen.replica.pool import PoolAnnouncer
from loadgen.replica.prompts import Served
from loadgen.replica.publisher import KVPublisher, NoPublisher, Publisher, ReplayFraming
from loadgen.replica.rank import Encoder, RankRunner
from loadgen.replica.reply import Vocabulary, build_vocabulary
from loadgen.replica.setup import Events, Pool, Setup
from loadgen.replica.sglang_wire import SglangEncoder
from loadgen.replica.text import ReplicaTokenizer
from loadgen.replica.wire import BatchEncoder, EventEncoding, HashForm
from loadgen.tokenizer import default_folder

_REBIND_TIMEOUT_S = 5.0
_REBIND_PAUSE_S = 0.01
_PORT_TRIES = 50

Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Everything about the replicas of one process. Ports of 0 are free ones.

    With a base `port`, replica i listens on `port + i`. With a base `kv_port`, rank r of
    replica i publishes on `kv_port + 2 * (i * ranks + r)` and replays on the port after it; of
    the SGLang flavor, all ranks of a replica publish on consecutive ports, and then all replay;
    with a host per rank, each rank's two ports are one higher than those of the rank before it.
    """

    replicas: int = 1
    ranks: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    kv_port: int = 0
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
    flavor: Flavor = Flavor.VLLM
    dev_mode: bool = True
    faults: FaultPlan = field(default_factory=FaultPlan)
    setup: Setup = field(default_factory=Setup)


@dataclass(frozen=True, slots=True)
class Language:
    """A loaded tokenizer and what replies are made of; costs some time to build."""

    tokenizer: ReplicaTokenizer
    vocabulary: Vocabulary


def load_language(folder: Path) -> Language:
    """Raises TokenizerError for a folder that is not usable."""
    tokenizer = ReplicaTokenizer(folder)
    return Language(tokenizer, build_vocabulary(tokenizer.encode, tokenizer.token_texts()))


class Replica:
    """One replica that listens: its address and its ranks."""

    def __init__(self, server: HTTPServer, host: str, ranks: Sequence[RankRunner]) -> None:
        self.url = f"http://{host}:{server.port}"
        self.ranks = ranks
        self._server = server

    def describe(self) -> dict[str, Any]:
        """Its part of the start-up line."""
        addresses = [each for rank in self.ranks if (each := rank.publisher.address)]
        return {
            "url": self.url,
            "kv_events": [address.endpoint for address in addresses],
            "replay": [address.replay_endpoint for address in addresses],
        }

    async def close(self) -> None:
        """Stop at once, as if the process had died."""
        await self._server.close()
        for rank in self.ranks:
            await rank.close()


class Fleet:
    """All replicas of one process: `async with Fleet(config) as fleet`."""

    def __init__(self, config: FleetConfig, language: Language | None = None) -> None:
        self._config = config
        language = language or load_language(config.tokenizer)
        length = min(config.max_model_len_tokens, config.engine.capacity_tokens)
        self._generator = Generator(language.tokenizer, language.vocabulary, length)
        self._stack = AsyncExitStack()
        self._context = Context()
        self.replicas: list[Replica] = []

    async def __aenter__(self) -> Fleet:
        self._stack.callback(self._context.term)
        try:
            for number in range(self._config.replicas):
                self.replicas.append(await self._start(number, self._ports(number)))
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

    async def restart(self, number: int) -> None:
        """End one replica as a crash would and begin its next life on the same ports.

        The new life has an empty cache, and its events are numbered from 0 again.
        """
        old = self.replicas[number]
        described = old.describe()
        ports = [_port(described["url"])]
        for pair in zip(described["kv_events"], described["replay"], strict=True):
            ports += map(_port, pair)
        await old.close()
        async with asyncio.timeout(_REBIND_TIMEOUT_S):
            self.replicas[number] = await self._start_again(number, ports)

    async def _start_again(self, number: int, ports: Sequence[int]) -> Replica:
        # ZMQ gives a port back some time after its socket was closed.
        while True:
            try:
                return await self._start(number, ports)
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
            await asyncio.sleep(_REBIND_PAUSE_S)

    def _ports(self, number: int) -> list[int]:
        """HTTP, then two for each rank: where it publishes and where it replays."""
        config = self._config
        http = config.port and config.port + number
        base = config.kv_port and config.kv_port + 2 * number * config.ranks
        if config.setup.rank_per_host:
            base = base or _free_ports(config.host, config.ranks + 1)
            return [http, *(base + rank + part for rank in range(config.ranks) for part in (0, 1))]
        if config.flavor is not Flavor.SGLANG:
            return [http, *(base and base + place for place in range(2 * config.ranks))]
        # SGLang tells rank 0's ports alone, the others follow from them.
        base = base or _free_ports(config.host, 2 * config.ranks)
        return [http, *(base + rank + part for rank in range(config.ranks)
                        for part in (0, config.ranks))]  # fmt: skip

    async def _start(self, number: int, ports: Sequence[int]) -> Replica:
        config = self._config
        ranks: list[RankRunner] = []
        for rank in range(config.ranks):
            runner = self._rank(rank, *ports[1 + 2 * rank : 3 + 2 * rank])
            self._stack.push_async_callback(runner.close)
            runner.publisher.start()
            ranks.append(runner)
        length = self._generator.max_model_len_tokens
        owner = config.flavor.value
        served = Served(config.model_name, config.adapters, length, int(time.time()), owner)
        api = ReplicaAPI(
            served,
            self._generator,
            config.engine,
            ranks,
            flavor=config.flavor,
            dev_mode=config.dev_mode,
            faults=config.faults,
            setup=config.setup,
        )
        server = HTTPServer(api.handle, Clock(config.setup.clock_skew_s))
        self._stack.push_async_callback(server.close)
        await server.start(config.host, ports[0])
        return Replica(server, config.host, ranks)

    def _rank(self, rank: int, port: int = 0, replay_port: int = 0) -> RankRunner:
        config, setup = self._config, self._config.setup
        encoder: Encoder = BatchEncoder(
            config.events, config.hash_form, rank, extra_keys=setup.since(0, 19)
        )
        if config.flavor is Flavor.SGLANG:
            encoder = SglangEncoder(config.events, rank)
        return RankRunner(
            Engine(config.engine, config.seed),
            encoder,
            self._publisher(rank, port, replay_port),
            wall=Clock(setup.clock_skew_s).now_s,
            pool=PoolAnnouncer(setup.pool, setup.pool_blocks, config.seed)
            if setup.pool is not Pool.NONE
            else None,
        )

    def _publisher(self, rank: int, port: int, replay_port: int) -> Publisher:
        config, setup = self._config, self._config.setup
        if setup.events is Events.OFF:
            return NoPublisher()
        bind = setup.events is Events.BIND
        return KVPublisher(
            self._context,
            host=f"127.0.0.{1 + rank}" if setup.rank_per_host else config.host,
            port=port if bind or port else _free_ports(config.host, 1),
            replay_port=replay_port,
            topic=config.topic,
            framing=config.replay_framing,
            buffer_steps=config.buffer_steps,
            bind=bind,
        )


def _free_ports(host: str, count: int) -> int:
    """The first of `count` consecutive ports that nobody used a moment ago. Raises OSError."""
    for _ in range(_PORT_TRIES):
        with ExitStack() as stack:
            try:
                first = stack.enter_context(socket.create_server((host, 0))).getsockname()[1]
                for place in range(1, count):
                    stack.enter_context(socket.create_server((host, first + place)))
            except (OSError, OverflowError):
                continue
            return int(first)
    raise OSError(f"no {count} consecutive free ports on {host}")


def _port(address: str) -> int:
    port = urlsplit(address).port
    assert port is not None
    return port
