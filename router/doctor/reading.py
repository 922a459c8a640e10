"""What engines say of their set-up, read into plain values. Nothing raises, whatever is said."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from router.doctor.facts import Connector

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The prefix cache by /metrics or /server_info."""

    block_tokens: int | None = None
    prefix_caching: bool | None = None
    dp_size: int | None = None


def cache_info(exposition: str) -> CacheInfo:
    """`vllm:cache_config_info` of GET /metrics: one sample for each rank of the front end."""
    lines = re.findall(r"^vllm:cache_config_info\{(.*)\} ", exposition, re.MULTILINE)
    labels = [dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', line)) for line in lines]
    if not labels:
        return CacheInfo()
    sizes = {each.get("block_size", "") for each in labels}
    caching = {each.get("enable_prefix_caching", "") for each in labels}
    return CacheInfo(
        _whole(sizes.pop()) if len(sizes) == 1 else None,
        {"True": True, "False": False}.get(caching.pop()) if len(caching) == 1 else None,
        len({each.get("engine") for each in labels}),
    )


def vllm_config(info: Any) -> dict[str, Any]:
    """The configuration in GET /server_info?config_format=json, which needs developer mode."""
    config = info.get("vllm_config") if isinstance(info, dict) else None
    return config if isinstance(config, dict) else {}


def sglang_cache(info: Any) -> CacheInfo:
    """GET /server_info of SGLang."""
    arguments = info.get("server_args", info) if isinstance(info, dict) else {}
    if not isinstance(arguments, dict):
        return CacheInfo()
    off = arguments.get("disable_radix_cache")
    return CacheInfo(
        _whole(arguments.get("page_size")),
        not off if isinstance(off, bool) else None,
        _whole(arguments.get("dp_size")),
    )


def connectors(config: dict[str, Any]) -> Connector | None:
    """The connector that announces a pool, if vLLM's configuration names one."""
    given = config.get("kv_transfer_config")
    if not isinstance(given, dict):
        return None
    extra = given.get("kv_connector_extra_config")
    extra = extra if isinstance(extra, dict) else {}
    several = extra.get("connectors")
    if given.get("kv_connector") == "MultiConnector" and isinstance(several, list):
        found = [connectors({"kv_transfer_config": each}) for each in several]
        return next((each for each in found if each and "LMCache" in each.name), None)
    name = given.get("kv_connector")
    mode = extra.get("lmcache.mp.mp_transfer_mode")
    if not isinstance(name, str) or not name:
        return None
    return Connector(name, mode if isinstance(mode, str) else "")


def events_off(config: dict[str, Any]) -> bool:
    """Whether vLLM's configuration is known, and says that nothing is published."""
    if "kv_events_config" not in config:
        return False
    given = config["kv_events_config"]
    return not isinstance(given, dict) or given.get("enable_kv_cache_events") is False


def version_of(text: str | None) -> Version | None:
    """Major and minor of a release; None for builds that do not say which one they are."""
    found = re.match(r"v?(\d+)\.(\d+)", text or "")
    # A checkout without tags calls itself 0.1.dev.
    if found is None or re.match(r"v?0\.[01]\.dev", text or ""):
        return None
    return int(found[1]), int(found[2])


def _whole(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError):
        return None
    return number if number > 0 else None
