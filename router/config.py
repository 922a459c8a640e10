"""The one documented model of every setting: flags, then environment, then YAML, then defaults."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from redis.asyncio.connection import parse_url

from router.errors import ConfigError

DNS_SCHEME = "dns+http"

logger = logging.getLogger("kvroute.config")

ENV_PREFIX = "KVROUTE_"
PolicyName = Literal["cost", "round_robin", "least_load", "prefix_only", "random"]


_TOKEN = re.compile(r"[\x21-\x7e]+")


def _secret(given: SecretStr | None) -> SecretStr | None:
    """A token that fits a header; an empty one, as an unset variable gives, is none.

    Raises ValueError, without the secret.
    """
    text = given.get_secret_value().strip() if given is not None else ""
    if not text:
        return None
    if not _TOKEN.fullmatch(text):
        raise ValueError("a token is printable ASCII without spaces")
    return SecretStr(text)


_PRINTABLE = re.compile(r"[\x21-\x7e]*")


class KvEventsConfig(BaseModel):
    """Where one data-parallel rank of a replica publishes its KV events.

    Without `endpoint` its engine dials `kv_events_bind`, under its replica's name or `topic`.
    """

    model_config = ConfigDict(extra="forbid")

    rank: Annotated[int, Field(ge=0, description="data-parallel rank")] = 0
    endpoint: Annotated[
        str | None,
        Field(description="ZMQ PUB address, e.g. tcp://10.0.0.7:5557; unset: it dials us"),
    ] = None
    replay_endpoint: Annotated[str | None, Field(description="ZMQ ROUTER address")] = None
    topic: Annotated[
        str, Field(description="subscription prefix; of an engine that dials, its whole topic")
    ] = ""


class ReplicaConfig(BaseModel):
    """One serving engine behind one base URL."""

    model_config = ConfigDict(extra="forbid")

    url: Annotated[
        str,
        Field(description="http://10.0.0.7:8000, or dns+http://name:8000 for all its addresses"),
    ]
    name: Annotated[
        str,
        Field(
            description="name in headers and metrics; host:port if empty",
            pattern=r"^[\x21-\x7e]*$",
            max_length=200,
        ),
    ] = ""
    kv_events: Annotated[
        list[KvEventsConfig] | None,
        Field(description="publishers; asked of GET /kv_event_sources if unset"),
    ] = None
    api_key: Annotated[
        SecretStr | None, Field(description="in place of `replica_api_key`, for this one")
    ] = None

    @field_validator("url")
    @classmethod
    def _base_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme == "https":
            raise ValueError("TLS to replicas is not supported; use http:// to them")
        if parts.path.rstrip("/").endswith("/v1"):
            raise ValueError("leave out the /v1: it is part of each request's path")
        if parts.scheme not in ("http", DNS_SCHEME) or not parts.hostname:
            raise ValueError(f"{url!r} is not a base URL such as http://10.0.0.7:8000")
        if parts.query or parts.fragment or parts.username:
            raise ValueError("a base URL has no query, fragment or user")
        if not _PRINTABLE.fullmatch(parts.netloc + parts.path):
            raise ValueError(f"{url!r} has characters that no header can carry; encode them")
        try:
            parts.hostname.encode("idna")
        except UnicodeError:
            raise ValueError(f"{parts.hostname!r} is no host name") from None
        _ = parts.port  # raises ValueError when out of range
        return url.rstrip("/")

    @field_validator("api_key")
    @classmethod
    def _usable_key(cls, key: SecretStr | None) -> SecretStr | None:
        return _secret(key)

    @field_validator("kv_events")
    @classmethod
    def _zmq_addresses(cls, events: list[KvEventsConfig] | None) -> list[KvEventsConfig] | None:
        for event in events or ():
            for address in (event.endpoint, event.replay_endpoint):
                if address is not None and not address.startswith(("tcp://", "ipc://")):
                    raise ValueError(
                        f"{address!r} is not a ZMQ address such as tcp://10.0.0.7:5557"
                    )
        return events

    @property
    def dials(self) -> bool:
        """Whether a publisher of its engine connects to `kv_events_bind`."""
        return any(event.endpoint is None for event in self.kv_events or ())

    @property
    def by_dns(self) -> bool:
        """Whether it stands for all addresses of a name."""
        return urlsplit(self.url).scheme == DNS_SCHEME

    @model_validator(mode="after")
    def _default_name(self) -> ReplicaConfig:
        if self.name and self.by_dns:
            raise ValueError("name: the replicas of a dns+http URL are named host:port")
        if not self.name:
            self.name = urlsplit(self.url).netloc
        return self


class Settings(BaseSettings):
    """Every setting of `kvroute serve`; environment names carry the prefix KVROUTE_."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid")

    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="port; 0 takes a free one")] = 8080
    replicas: Annotated[list[ReplicaConfig], Field(description="the vLLM replicas")] = []
    replica_api_key: Annotated[
        SecretStr | None,
        Field(description="the engines' --api-key, for probes, and /tokenize without the client's"),
    ] = None
    replica_api_key_file: Annotated[
        Path | None, Field(description="file that holds it, such as a mounted secret")
    ] = None
    policy: Annotated[PolicyName, Field(description="how a replica is chosen")] = "cost"
    redis_url: Annotated[
        str | None, Field(description="redis:// or unix:// URL; unset starts a private Valkey")
    ] = None
    tokenizer: Annotated[
        Path | None,
        Field(description="folder with tokenizer.json and chat template; unset asks a replica"),
    ] = None
    tokenizers: Annotated[
        dict[str, Path], Field(description="folder per model name, before `tokenizer`")
    ] = {}
    model_aliases: Annotated[
        dict[str, str],
        Field(description="names for models: what clients ask for to what is served"),
    ] = {}
    allow_pin: Annotated[
        bool, Field(description="whether `x-kvroute-pin: NAME[/RANK]` may choose the replica")
    ] = False
    retry_statuses: Annotated[
        list[int], Field(description="a replica's answers that are tried elsewhere")
    ] = [502, 503, 504]
    retry_budget: Annotated[
        float,
        Field(ge=0, le=1, description="retries of answered requests, as a share of all requests"),
    ] = 0.2
    kv_events_bind: Annotated[
        str | None,
        Field(description="tcp://*:5557: a socket of ours for engines whose publishers dial"),
    ] = None
    base_unit_tokens: Annotated[
        int, Field(ge=1, le=4096, description="tokens per hashed unit; divides every block size")
    ] = 16
    prefill_tokens_per_s: Annotated[
        float, Field(gt=0, description="prior of a replica's prefill rate; learned from then on")
    ] = 8000.0
    running_share: Annotated[
        float,
        Field(ge=0, description="share of a mean prefill that a request in flight counts for"),
    ] = 0.2
    max_body_bytes: Annotated[int, Field(ge=1024, description="larger bodies get a 413")] = 64 << 20
    max_inflight: Annotated[int, Field(ge=1, description="requests at once; beyond it 503")] = 8192
    max_connections: Annotated[
        int, Field(ge=1, description="clients connected at once; beyond it 503 and closed")
    ] = 20000
    max_head_bytes: Annotated[
        int, Field(ge=1024, description="request line and headers; larger ones get a 431")
    ] = 64 << 10
    max_target_bytes: Annotated[
        int, Field(ge=64, description="path and query; longer ones get a 414")
    ] = 8 << 10
    max_headers: Annotated[int, Field(ge=8, description="headers; more of them get a 431")] = 200
    head_timeout_s: Annotated[
        float, Field(gt=0, description="to send a request's head; past it 408")
    ] = 10.0
    client_idle_timeout_s: Annotated[
        float, Field(gt=0, description="clients' idle connections are closed after this")
    ] = 75.0
    tolerate_half_close: Annotated[
        bool, Field(description="answer clients that have closed their side; else they have left")
    ] = False
    body_timeout_s: Annotated[
        float, Field(gt=0, description="to read a request body, or a passed-on form's next piece")
    ] = 60.0
    connect_timeout_s: Annotated[float, Field(gt=0, description="to connect to a replica")] = 2.0
    first_byte_timeout_s: Annotated[
        float, Field(gt=0, description="longest wait for a replica's answer to begin")
    ] = 600.0
    idle_timeout_s: Annotated[
        float, Field(gt=0, description="longest silence of a replica within one answer")
    ] = 600.0
    request_timeout_s: Annotated[
        float, Field(gt=0, description="one whole request; `x-request-timeout` may shorten it")
    ] = 1800.0
    render_timeout_s: Annotated[
        float, Field(gt=0, description="to have a replica tokenize; past it load decides")
    ] = 0.2
    keepalive_s: Annotated[
        float, Field(gt=0, description="idle connections to replicas are closed after this")
    ] = 4.0
    probe_interval_s: Annotated[float, Field(gt=0, description="between health probes")] = 2.0
    probe_timeout_s: Annotated[float, Field(gt=0, description="of one health probe")] = 2.0
    dns_interval_s: Annotated[
        float, Field(gt=0, description="between look-ups of the names in dns+http URLs")
    ] = 5.0
    breaker_failures: Annotated[
        int, Field(ge=1, description="broken requests in a row that take a replica out")
    ] = 3
    slow_start_s: Annotated[
        float, Field(ge=0, description="a replica that is back gets more and more for so long")
    ] = 10.0
    eject_error_share: Annotated[
        float, Field(ge=0, le=1, description="failed share that ejects a replica; 0: never")
    ] = 0.5
    eject_ttft_factor: Annotated[
        float, Field(ge=0, description="ejects by first token, times the peers' median; 0: never")
    ] = 5.0
    eject_s: Annotated[
        float, Field(gt=0, description="a first ejection; each repetition doubles it")
    ] = 10.0
    admin_token: Annotated[
        SecretStr | None,
        Field(description="bearer token of the /admin routes; unset they answer 403"),
    ] = None
    doctor: Annotated[
        Literal["off", "passive", "active"],
        Field(description="checks of replicas; active: with tiny requests too"),
    ] = "passive"
    drain_notice_s: Annotated[
        float, Field(ge=0, description="/readyz says 503 for this long before the listener closes")
    ] = 0.0
    drain_s: Annotated[float, Field(ge=0, description="running requests may take at exit")] = 30.0
    make_traceparent: Annotated[
        bool,
        Field(description="a request without a `traceparent` header gets one, marked as sampled"),
    ] = True
    access_log: Annotated[bool, Field(description="one JSON line per request")] = False
    receipts: Annotated[
        int, Field(ge=0, le=100_000, description="requests whose decision can be explained; 0: off")
    ] = 1000
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="least level logged")
    ] = "info"

    @model_validator(mode="after")
    def _names_differ(self) -> Settings:
        names = [replica.name for replica in self.replicas]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"replicas: the name {twice[0]!r} is used more than once")
        urls = [replica.url for replica in self.replicas]
        same = sorted({url for url in urls if urls.count(url) > 1})
        if same:
            raise ValueError(f"replicas: {same[0]} is given more than once; one engine, one name")
        return self

    @model_validator(mode="after")
    def _aliases_end(self) -> Settings:
        for alias, target in self.model_aliases.items():
            if target in self.model_aliases:
                raise ValueError(
                    f"model_aliases: {alias!r} stands for {target!r}, which is an alias itself; "
                    "name the served model"
                )
        return self

    @field_validator("kv_events_bind")
    @classmethod
    def _bindable(cls, address: str | None) -> str | None:
        if not address:
            return None
        if address.startswith("ipc://"):
            return address
        parts = urlsplit(address)
        if parts.scheme != "tcp" or not parts.port or parts.path or not parts.netloc:
            raise ValueError(f"{address!r} is not an address to bind such as tcp://*:5557")
        return address

    @model_validator(mode="after")
    def _dialed_is_bound(self) -> Settings:
        for replica in self.replicas:
            if replica.dials and self.kv_events_bind is None:
                raise ValueError(
                    f"replicas: kv_events of {replica.name!r} has no endpoint, so its engine "
                    "dials us: set kv_events_bind to tcp://*:5557"
                )
        return self

    @field_validator("admin_token")
    @classmethod
    def _some_token(cls, token: SecretStr | None) -> SecretStr | None:
        """An empty secret, as an unset variable of a deployment gives, is none."""
        return token if token is not None and token.get_secret_value().strip() else None

    @field_validator("replica_api_key")
    @classmethod
    def _usable_key(cls, key: SecretStr | None) -> SecretStr | None:
        return _secret(key)

    @model_validator(mode="after")
    def _key_from_file(self) -> Settings:
        path = self.replica_api_key_file
        if path is None:
            return self
        if self.replica_api_key is not None:
            raise ValueError("replica_api_key_file: replica_api_key is set too; give one of them")
        try:
            self.replica_api_key = _secret(SecretStr(path.read_text("utf-8")))
        except (OSError, ValueError) as error:
            raise ValueError(f"replica_api_key_file: {path}: {error}") from None
        if self.replica_api_key is None:
            raise ValueError(f"replica_api_key_file: {path} is empty")
        return self

    @field_validator("retry_statuses")
    @classmethod
    def _error_statuses(cls, statuses: list[int]) -> list[int]:
        wrong = [status for status in statuses if not 400 <= status <= 599]
        if wrong:
            raise ValueError(f"{wrong[0]} is no error status (400 to 599)")
        return statuses

    @field_validator("replicas", mode="before")
    @classmethod
    def _plain_urls(cls, replicas: Any) -> Any:
        """A URL alone stands for a replica with no other settings."""
        if not isinstance(replicas, list):
            return replicas
        return [{"url": each} if isinstance(each, str) else each for each in replicas]

    @field_validator("redis_url")
    @classmethod
    def _redis_address(cls, url: str | None) -> str | None:
        if url is not None:
            parse_url(url)  # raises ValueError for a scheme or port that cannot be used
        return url

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags come first, then the environment; YAML is the weakest source, under `_yaml`."""
        given = dict(init_settings())
        from_yaml = InitSettingsSource(settings_cls, given.pop("_yaml", {}))
        return InitSettingsSource(settings_cls, given), env_settings, from_yaml


def load_settings(config: Path | None = None, **flags: Any) -> Settings:
    """Settings from a YAML file, the environment and flags that are not None.

    Raises ConfigError, one line per wrong field, naming it.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if config is not None:
        given["_yaml"] = _read_yaml(config)
    try:
        settings = Settings(**given)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None
    except ValueError as error:  # an environment value that is not JSON
        raise ConfigError(str(error)) from None
    for name in sorted(set(os.environ)):
        known = name.removeprefix(ENV_PREFIX).lower() in Settings.model_fields
        if name.startswith(ENV_PREFIX) and not known:
            # Not an error: a cluster puts variables of this form in place for its services.
            logger.warning("%s is set, but there is no such setting", name)
    if not settings.replicas:
        raise ConfigError(
            "replicas: none given; pass --replica http://HOST:PORT (repeatable), "
            "KVROUTE_REPLICAS or `replicas:` in the YAML file"
        )
    return settings


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of settings")
    return content


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "settings"
        hint = " (no such setting)" if item["type"] == "extra_forbidden" else ""
        lines.append(f"{where}: {item['msg'].removeprefix('Value error, ')}{hint}")
    return "\n".join(lines)
