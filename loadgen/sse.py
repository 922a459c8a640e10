"""Server-sent events from a byte stream, however it is cut into pieces."""

from __future__ import annotations

from loadgen.errors import LoadgenError

MAX_EVENT_BYTES = 16 * 1024 * 1024


class EventTooLong(LoadgenError):
    """An event passed MAX_EVENT_BYTES without an end."""


class SseDecoder:
    """Feed bytes, get the data of each complete event.

    Lines may end in LF or CRLF and may be cut anywhere. Several `data:` lines of one event are
    joined by a newline; comments and other fields are left out, as the load client needs none.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of the events that `piece` completes. Raises EventTooLong."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        events: list[bytes] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
