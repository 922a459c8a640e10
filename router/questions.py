"""Questions of `kvroute explain` to a running gateway, and what is wrong when it cannot answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from secrets import token_hex
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from router.errors import CommandError

ANSWER_S = 60.0
"""How long the gateway may take to answer a question about itself."""
FINISHED_S = 5.0
"""How long after an answer's end its receipt may still say that it runs."""
MAX_ERROR_BYTES = 2000
_CUT = (httpx.RemoteProtocolError, httpx.ReadError)
"""How the end of an answer that broke off looks; its receipt tells the rest."""
Json = dict[str, Any]


class GatewayQuestions:
    """A client of one gateway's admin routes; a context manager. All raise CommandError."""

    def __init__(self, url: str, admin_token: str | None, api_key: str | None) -> None:
        self._url = _base_url(url)
        self._client = httpx.Client(base_url=self._url, trust_env=False, timeout=ANSWER_S)
        self._admin = {"authorization": f"Bearer {admin_token}"} if admin_token else {}
        self._api_key = api_key

    def __enter__(self) -> GatewayQuestions:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._client.close()

    def explain(self, body: bytes, path: str) -> Json:
        """What would be done with a body."""
        own = {"x-kvroute-client-authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        return self._ask("POST", "/admin/explain", {"path": path}, content=body, headers=own)

    def decision(self, request_id: str) -> Json:
        """The receipt of a request."""
        return self._ask("GET", f"/admin/decisions/{quote(request_id, safe='')}")

    def send(self, body: bytes, path: str, timeout_s: float) -> tuple[Json, str]:
        """Send a body and wait for the end of its answer: its receipt, and an error's text."""
        if not self._ask("GET", "/admin/decisions", {"limit": "1"})["limit"]:
            raise CommandError("that gateway keeps no receipts: its setting `receipts` is 0")
        request_id = f"explain-{token_hex(8)}"
        sent = {"content-type": "application/json", "x-request-id": request_id}
        if self._api_key:
            sent["authorization"] = f"Bearer {self._api_key}"
        refusal = b""
        asked = self._client.stream("POST", path, content=body, headers=sent, timeout=timeout_s)
        with self._reaching(), suppress(*_CUT), asked as answer:
            for piece in answer.iter_bytes():
                if answer.status_code >= 400 and len(refusal) < MAX_ERROR_BYTES:
                    refusal += piece
        return self._finished(request_id), refusal[:MAX_ERROR_BYTES].decode("utf-8", "replace")

    def _finished(self, request_id: str) -> Json:
        until_s = time.monotonic() + FINISHED_S
        while (told := self.decision(request_id))["state"] == "running":
            if time.monotonic() > until_s:
                break
            time.sleep(0.02)
        return told

    def _ask(
        self,
        method: str,
        path: str,
        params: dict[str, str] | None = None,
        *,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Json:
        with self._reaching():
            answer = self._client.request(
                method, path, params=params, content=content, headers=self._admin | (headers or {})
            )
        try:
            told = answer.json()
        except ValueError:
            told = None
        if answer.status_code != 200 or not isinstance(told, dict):
            raise CommandError(self._refusal(answer, told))
        return told

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            raise CommandError(f"no answer from {self._url} in time: {error}") from None
        except (httpx.TransportError, httpx.InvalidURL) as error:
            message = f"cannot reach a gateway at {self._url}: {error} (--url says where it is)"
            raise CommandError(message) from None

    def _refusal(self, answer: httpx.Response, told: Any) -> str:
        error = told.get("error") if isinstance(told, dict) else None
        ours = "x-kvroute-request-id" in answer.headers
        if not ours or not isinstance(error, dict) or "message" not in error:
            status = answer.status_code
            return f"{self._url} answered with status {status}; is it a kvroute gateway?"
        hint = " (--admin-token, KVROUTE_ADMIN_TOKEN)" if answer.status_code == 401 else ""
        return f"{error['message']}{hint}"


def _base_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise CommandError(f"--url: {url!r} is not a URL such as http://127.0.0.1:8080")
    return url.rstrip("/").removesuffix("/v1")
