"""Content codings of request bodies, decoded piece by piece.

A few bytes can decode to gigabytes, so no decoder here is ever asked for more than a piece at
once, and whoever takes the pieces can stop. gzip and deflate are always there; br and zstd where
a library is (`brotli` from 1.2 on; Python 3.14's own zstd or `backports.zstd`).
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from router.errors import InvalidRequest, UnsupportedEncoding
from router.upstream import Headers

PIECE_BYTES = 256 << 10
ZSTD_WINDOW_LOG_MAX = 23
"""RFC 9659: larger windows are not for the web."""


class Decoder(Protocol):
    """One body's decoder. Both methods raise InvalidRequest for what is not of the coding."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Pieces of at most `PIECE_BYTES` that `data` decodes to."""
        ...

    def end(self) -> None:
        """The body has ended here."""
        ...


def _corrupt(coding: str, error: object) -> InvalidRequest:
    return InvalidRequest(f"The request body is not valid {coding}: {error}.")


class _Zlib:
    """gzip, of one or more members, and deflate: with zlib's wrapping or, as some send it, bare."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._inner: Any = None

    def _begin(self, data: bytes) -> None:
        if self._coding == "gzip":
            wbits = 31
        elif self._inner is not None:
            raise _corrupt(self._coding, "data after its end")
        else:
            wbits = 15 if data[0] & 0x0F == 8 else -15
        self._inner = zlib.decompressobj(wbits)

    def feed(self, data: bytes) -> Iterator[bytes]:
        piece = b""
        while data or len(piece) == PIECE_BYTES:
            if data and (self._inner is None or self._inner.eof):
                self._begin(data)
            try:
                piece = self._inner.decompress(data, PIECE_BYTES)
            except zlib.error as error:
                raise _corrupt(self._coding, error) from None
            data = self._inner.unused_data if self._inner.eof else self._inner.unconsumed_tail
            if piece:
                yield piece

    def end(self) -> None:
        if self._inner is None or not self._inner.eof:
            raise _corrupt(self._coding, "it ends early")


class _Zstd:
    """zstd, of one or more frames."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._inner = self._begin()

    def _begin(self) -> Any:
        options = {self._library.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG_MAX}
        return self._library.ZstdDecompressor(options=options)

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data or not (self._inner.eof or self._inner.needs_input):
            if self._inner.eof:
                self._inner = self._begin()
            try:
                piece = self._inner.decompress(data, PIECE_BYTES)
            except self._library.ZstdError as error:
                raise _corrupt("zstd", error) from None
            data = self._inner.unused_data if self._inner.eof else b""
            if piece:
                yield piece

    def end(self) -> None:
        if not self._inner.eof:
            raise _corrupt("zstd", "it ends early")


class _Brotli:
    def __init__(self, library: Any) -> None:
        self._library = library
        self._inner = library.Decompressor()

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data or not self._inner.can_accept_more_data():
            if self._inner.is_finished():
                raise _corrupt("br", "data after its end")
            try:
                piece = self._inner.process(data, output_buffer_limit=PIECE_BYTES)
            except self._library.error as error:
                raise _corrupt("br", error) from None
            data = b""
            if piece:
                yield piece

    def end(self) -> None:
        if not self._inner.is_finished():
            raise _corrupt("br", "it ends early")


def _library(*names: str) -> Any | None:
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def _available() -> dict[str, Callable[[], Decoder]]:
    codings: dict[str, Callable[[], Decoder]] = {
        "gzip": lambda: _Zlib("gzip"),
        "deflate": lambda: _Zlib("deflate"),
    }
    brotli = _library("brotli")
    # Before 1.2 it could not be held to a bound.
    if brotli is not None and hasattr(brotli.Decompressor, "can_accept_more_data"):
        codings["br"] = lambda: _Brotli(brotli)
    zstd = _library("compression.zstd", "backports.zstd")
    if zstd is not None:
        codings["zstd"] = lambda: _Zstd(zstd)
    return codings


CODINGS = _available()


def decoder_for(headers: Headers) -> Decoder | None:
    """The decoder for a body, None for a plain one. Raises UnsupportedEncoding."""
    values = [value for name, value in headers if name == b"content-encoding"]
    if not values:
        return None
    named = b",".join(values).decode("latin-1").lower().split(",")
    codings = [each.strip() for each in named if each.strip() not in ("", "identity")]
    if not codings:
        return None
    make = CODINGS.get(codings[0].removeprefix("x-"))
    if make is None or len(codings) > 1:
        shown = ", ".join(codings)[:80]
        raise UnsupportedEncoding(
            f"Content-Encoding {shown!r} is not accepted; "
            f"send the body plain or in one of: {', '.join(CODINGS)}."
        )
    return make()
