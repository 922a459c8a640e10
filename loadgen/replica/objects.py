"""/v1/files in OpenAI's shapes: a small store in memory that forgets the oldest."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from loadgen.replica.answering import respond_json
from loadgen.replica.errors import RequestRefused
from loadgen.replica.forms import read_form, required
from loadgen.replica.http import Exchange
from loadgen.replica.routing import Route

_MAX_FILES = 1000
_MAX_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file and its bytes."""

    name: str
    purpose: str
    data: bytes
    id: str = field(default_factory=lambda: f"file-{uuid4().hex}")
    created_s: int = field(default_factory=lambda: int(time.time()))

    def json(self) -> dict[str, Any]:
        """The file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": len(self.data),
            "created_at": self.created_s,
            "expires_at": None,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """Bounded in files and in bytes: the oldest leave first."""

    def __init__(self, max_files: int = _MAX_FILES, max_bytes: int = _MAX_BYTES) -> None:
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._files: OrderedDict[str, StoredFile] = OrderedDict()

    def add(self, file: StoredFile) -> None:
        """Keep a file. Raises RequestRefused (413) for one that could never fit."""
        if len(file.data) > self._max_bytes:
            message = f"A file may have {self._max_bytes} bytes."
            raise RequestRefused(message, status=413, kind="invalid_request_error", param="file")
        self._files[file.id] = file
        self._held_bytes += len(file.data)
        while len(self._files) > self._max_files or self._held_bytes > self._max_bytes:
            self.remove(next(iter(self._files)))

    def find(self, file_id: str) -> StoredFile:
        """Raises RequestRefused (404)."""
        file = self._files.get(file_id)
        if file is None:
            raise not_found("File", file_id)
        return file

    def remove(self, file_id: str) -> None:
        """Raises RequestRefused (404)."""
        self._held_bytes -= len(self.find(file_id).data)
        del self._files[file_id]

    def all(self) -> list[StoredFile]:
        """The newest first."""
        return list(reversed(self._files.values()))


class FileRoutes:
    """Uploading, reading, listing, deleting."""

    def __init__(self, store: FileStore) -> None:
        self._store = store

    def routes(self) -> list[Route]:
        """What this part answers."""
        return [
            Route("POST", "/v1/files", self._upload),
            Route("GET", "/v1/files", self._list),
            Route("GET", "/v1/files/{}", self._get),
            Route("DELETE", "/v1/files/{}", self._delete),
            Route("GET", "/v1/files/{}/content", self._content),
        ]

    def _upload(self, exchange: Exchange) -> None:
        form = read_form(exchange.request)
        part = required(form, "file", file=True)
        file = StoredFile(part.filename or "", required(form, "purpose").text, part.data)
        self._store.add(file)
        respond_json(exchange, file.json())

    def _list(self, exchange: Exchange) -> None:
        purpose = exchange.request.argument("purpose")
        files = [file for file in self._store.all() if purpose in ("", file.purpose)]
        respond_json(exchange, listing([file.json() for file in files]))

    def _get(self, exchange: Exchange, file_id: str) -> None:
        respond_json(exchange, self._store.find(file_id).json())

    def _delete(self, exchange: Exchange, file_id: str) -> None:
        self._store.remove(file_id)
        respond_json(exchange, {"id": file_id, "object": "file", "deleted": True})

    def _content(self, exchange: Exchange, file_id: str) -> None:
        exchange.respond(200, self._store.find(file_id).data, "application/octet-stream")


def not_found(kind: str, object_id: str) -> RequestRefused:
    """The 404 for an object that is not here."""
    return RequestRefused(
        f"No such {kind} object: {object_id}", status=404, kind="invalid_request_error", param="id"
    )


def listing(items: list[dict[str, Any]]) -> dict[str, Any]:
    """A list that has no further pages."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": False,
    }
