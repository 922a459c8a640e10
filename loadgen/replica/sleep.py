"""Developer-mode routes of vLLM: sleeping, waking, and what the server runs with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from loadgen.replica.answering import respond_json
from loadgen.replica.errors import InvalidBody, RequestRefused
from loadgen.replica.http import Exchange
from loadgen.replica.model import EngineModel
from loadgen.replica.prompts import Served
from loadgen.replica.rank import RankRunner
from loadgen.replica.routing import Route
from loadgen.replica.setup import Setup

_LEVELS = ("0", "1", "2")
_MODES = ("abort", "wait", "keep")


class SleepRoutes:
    """Sleep mode over all ranks of a replica.

    A sleeping vLLM refuses nothing: what is in flight ends with finish_reason "abort", what
    arrives is taken and waits for `/wake_up` without a word, and `/health` stays 200.
    """

    def __init__(self, ranks: Sequence[RankRunner]) -> None:
        self._ranks = ranks

    def routes(self, prefix: str = "") -> list[Route]:
        """What this part answers, under a prefix."""
        return [
            Route("POST", f"{prefix}/sleep", self._sleep),
            Route("POST", f"{prefix}/wake_up", self._wake_up),
            Route("GET", f"{prefix}/is_sleeping", self._is_sleeping),
        ]

    def _sleep(self, exchange: Exchange) -> None:
        level = exchange.request.argument("level", "1")
        if level not in _LEVELS:
            raise InvalidBody("query.level", f"Input should be 0, 1 or 2, not {level!r}")
        mode = exchange.request.argument("mode", "abort")
        if mode not in _MODES:
            raise InvalidBody("query.mode", "Input should be 'abort', 'wait' or 'keep'")
        if mode != "abort":
            raise RequestRefused(f"pause mode {mode!r} is not simulated", param="mode")
        for rank in self._ranks:
            rank.sleep(int(level))
        respond_json(exchange, {"status": "sleeping", "level": int(level)})

    def _wake_up(self, exchange: Exchange) -> None:
        for rank in self._ranks:
            rank.wake()
        tags = exchange.request.arguments("tags") or None
        respond_json(exchange, {"status": "awake", "tags": tags})

    def _is_sleeping(self, exchange: Exchange) -> None:
        asleep = any(rank.sleep_level is not None for rank in self._ranks)
        respond_json(exchange, {"is_sleeping": asleep})


class ServerInfoRoutes:
    """GET /server_info, with the configuration as text or (`config_format=json`) as JSON."""

    def __init__(
        self, served: Served, model: EngineModel, ranks: int, setup: Setup = Setup()
    ) -> None:
        self._config = {
            "model_config": {
                "model": served.model,
                "served_model_name": served.model,
                "max_model_len": served.max_model_len_tokens,
            },
            "cache_config": {
                "block_size": model.block_size_tokens,
                "num_gpu_blocks": model.blocks,
                "enable_prefix_caching": model.prefix_caching,
            },
            "scheduler_config": {
                "max_num_batched_tokens": model.max_batched_tokens,
                "max_num_seqs": model.max_num_seqs,
                "policy": model.policy,
            },
            "parallel_config": {"data_parallel_size": ranks},
            "kv_transfer_config": setup.transfer_config,
            "additional_config": {"simulated_engine": asdict(model)},
        }

    def routes(self) -> list[Route]:
        """What this part answers."""
        return [Route("GET", "/server_info", self._server_info)]

    def _server_info(self, exchange: Exchange) -> None:
        wanted = exchange.request.argument("config_format", "text")
        config = self._config if wanted == "json" else str(self._config)
        body = {
            "vllm_config": config,
            "vllm_env": {"VLLM_SERVER_DEV_MODE": True},
            "system_env": {},
        }
        respond_json(exchange, body)
