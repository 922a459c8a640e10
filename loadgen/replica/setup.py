"""How a replica is set up, where that decides what of its cache others can see and use.

The defaults are a replica that hides nothing. Everything else is a mistake that real fleets make
and that no request shows: it is answered all the same, only slower than it need be.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum


class Events(StrEnum):
    """What becomes of a rank's KV events.

    `connect`: as with an endpoint that has no wildcard, the engine dials it instead of listening.
    """

    BIND = "bind"
    CONNECT = "connect"
    OFF = "off"


class Pool(StrEnum):
    """What an LMCache server behind the replica has it announce.

    `silent`: nothing, as by default on CPU. `stores`: what it stores, as with
    `--kv-event-log-size 0`. `lmcache_driven`: what is stored and what is removed.
    """

    NONE = "none"
    SILENT = "silent"
    STORES = "stores"
    LMCACHE_DRIVEN = "lmcache_driven"


@dataclass(frozen=True, slots=True)
class Setup:
    """One replica's flags and surroundings.

    `version` None is the newest that is simulated. `listed_host` is told in place of a wildcard,
    `listed_ranks` how many ranks are told of (None: all). With `rank_per_host` rank r listens on
    127.0.0.(1+r), as the ranks of an engine that spans hosts do. With `api_keys` requests must
    carry one of them, on the routes that the engine's --api-key guards. Prefix caching and ignored
    salts are the engine's own: see EngineModel.
    """

    version: str | None = None
    prompt_tokens_details: bool = True
    clock_skew_s: float = 0.0
    events: Events = Events.BIND
    listed_host: str = "*"
    listed_ranks: int | None = None
    rank_per_host: bool = False
    pool: Pool = Pool.NONE
    pool_blocks: int = 16384
    api_keys: tuple[str, ...] = field(default=(), repr=False)

    def since(self, major: int, minor: int) -> bool:
        """Whether vLLM of this version is simulated, or a later one."""
        found = re.match(r"(\d+)\.(\d+)", self.version or "")
        return found is None or (int(found[1]), int(found[2])) >= (major, minor)

    @property
    def transfer_config(self) -> dict[str, object] | None:
        """`--kv-transfer-config` of a replica with a pool."""
        if self.pool is Pool.NONE:
            return None
        driven = self.pool is Pool.LMCACHE_DRIVEN
        mode = {"lmcache.mp.mp_transfer_mode": "lmcache_driven"} if driven else {}
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": 5655, **mode}
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
