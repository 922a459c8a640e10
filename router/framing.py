"""What a request's head must be before anything of it is served.

Where two readers of the same bytes could see different requests, the request is refused: that is
how requests are smuggled past a gateway. The parser (llhttp, strict) already refuses
Content-Length next to Transfer-Encoding, repeated or odd Content-Length values, folded headers,
bare CR or LF, spaces around header names, and chunk sizes that are not plain hexadecimal. What it
lets through is refused here.
"""

from __future__ import annotations

import re

from router.errors import BadHttp
from router.upstream import Headers

_ABSOLUTE = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")


def check_head(method: str, version: str, headers: Headers) -> bool:
    """Whether the client waits for `100 Continue`. Raises BadHttp for a head not to be served."""
    if version not in ("1.1", "1.0"):
        raise BadHttp(f"HTTP/{version} is not spoken here; use HTTP/1.1.")
    if method in ("CONNECT", "SOURCE"):
        raise BadHttp(f"{method} is not served here.")
    hosts = 0
    waits = False
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding":
            _check_transfer_encoding(version, value)
        elif name == b"expect":
            waits = version == "1.1" and value.strip().lower() == b"100-continue"
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        raise BadHttp(f"A request carries one Host header; this one has {hosts}.")
    return waits


def _check_transfer_encoding(version: str, value: bytes) -> None:
    if version == "1.0":
        raise BadHttp("Transfer-Encoding is not part of HTTP/1.0.")
    if value.strip().lower() != b"chunked":
        raise BadHttp("The only Transfer-Encoding taken is `chunked`, alone and once.")


def framing_of(headers: Headers) -> bytes:
    """The header that says how long the body is; empty when there is none."""
    for name, value in headers:
        if name in (b"content-length", b"transfer-encoding") and value.strip() != b"0":
            return b"%b: %b" % (name, value)
    return b""


def split_target(target: bytes) -> tuple[bytes, bytes]:
    """A request target's path and query, in origin, absolute or asterisk form. Raises BadHttp."""
    if not target.startswith(b"/") and target != b"*":
        authority = _ABSOLUTE.match(target)
        if authority is None:
            raise BadHttp("The request target must be a path or an absolute URL.")
        target = target[authority.end() :]
    path, _, query = target.partition(b"#")[0].partition(b"?")
    return path or b"/", query
