"""A client's connection: uvicorn's HTTP/1.1 protocol that also says when the client leaves.

ASGI tells an application of a lost client only through another `receive`, which takes a task for
every request; here the connection itself calls back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.call import CONNECTION_KEY


class ClientConnection(HttpToolsProtocol):
    """Requests of one connection are served one after the other, so one callback is enough."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_gone: Callable[[], None] | None = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[CONNECTION_KEY] = self

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.on_gone is not None:
            self.on_gone()
