"""/v1/batches in OpenAI's shapes: the lines of an uploaded file, run through the engine."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import msgspec
import orjson

from loadgen.replica.answering import respond_json
from loadgen.replica.errors import RequestRefused
from loadgen.replica.http import Exchange, HTTPRequest
from loadgen.replica.objects import FileStore, StoredFile, listing, not_found
from loadgen.replica.requests import read_json
from loadgen.replica.routing import Route

_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_REMEMBERED = 100
_MAX_LINES = 50_000
_AT_ONCE = 16
_DAY_S = 24 * 3600
_KIND = "invalid_request_error"

Run = Callable[[Exchange], None]


class BatchRequest(msgspec.Struct, kw_only=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, Any] | None = None


class BatchLine(msgspec.Struct):
    """One request of an input file."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class LineExchange(Exchange):
    """A request without a client; its answer goes to `then(status, body)`."""

    def __init__(self, request: HTTPRequest, then: Callable[[int, bytes], None]) -> None:
        super().__init__(request, None)
        self._then = then

    @property
    def open(self) -> bool:
        return True

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        self.on_abandoned = None
        self._then(status, body)


class Batch:
    """One batch: a bounded number of its lines is in the engine at a time."""

    def __init__(
        self, request: BatchRequest, lines: list[BatchLine], files: FileStore, run: Run
    ) -> None:
        self.id = f"batch_{uuid4().hex}"
        self._request = request
        self._files = files
        self._run = run
        self._todo = deque(lines)
        self._total = len(lines)
        self._under_way: set[LineExchange] = set()
        self._output: list[bytes] = []
        self._errors: list[bytes] = []
        self._times: dict[str, int] = {"created_at": int(time.time())}
        self._files_made: dict[str, str] = {}
        self._filling = False
        self._status = "validating"

    def start(self) -> None:
        """Begin with the first lines."""
        self._mark("in_progress", "in_progress_at")
        self._fill()

    def cancel(self) -> None:
        """Stop; what is done stays done. Nothing happens to a batch that has ended."""
        if self._status != "in_progress":
            return
        self._mark("cancelled", "cancelled_at")
        self._todo.clear()
        for exchange in self._under_way:
            exchange.abandoned()
        self._under_way.clear()
        self._save()

    def json(self) -> dict[str, Any]:
        """The batch object."""
        request = self._request
        created_s = self._times["created_at"]
        counts = {
            "total": self._total,
            "completed": len(self._output),
            "failed": len(self._errors),
        }
        stages = ("in_progress", "finalizing", "completed", "failed", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": request.endpoint,
            "errors": None,
            "input_file_id": request.input_file_id,
            "completion_window": request.completion_window,
            "status": self._status,
            "output_file_id": self._files_made.get("output"),
            "error_file_id": self._files_made.get("error"),
            "created_at": created_s,
            **{f"{stage}_at": self._times.get(f"{stage}_at") for stage in stages},
            "expires_at": created_s + _DAY_S,
            "request_counts": counts,
            "metadata": request.metadata,
        }

    def _fill(self) -> None:
        # A line that is refused answers at once, from within the loop.
        if self._filling:
            return
        self._filling = True
        while self._todo and len(self._under_way) < _AT_ONCE:
            self._begin(self._todo.popleft())
        self._filling = False
        if self._status == "in_progress" and not self._under_way:
            self._mark("completed", "completed_at")
            self._save()

    def _begin(self, line: BatchLine) -> None:
        def answered(status: int, body: bytes) -> None:
            self._under_way.discard(exchange)
            self._record(line, status, body)
            self._fill()

        body = orjson.dumps({**line.body, "stream": False})
        headers = {"content-type": "application/json"}
        request = HTTPRequest("POST", line.url, headers, body, keep_alive=True, http_1_0=False)
        exchange = LineExchange(request, answered)
        self._under_way.add(exchange)
        self._run(exchange)

    def _record(self, line: BatchLine, status: int, body: bytes) -> None:
        number = uuid4().hex
        response = {"status_code": status, "request_id": number, "body": orjson.loads(body)}
        entry = {
            "id": f"batch_req_{number}",
            "custom_id": line.custom_id,
            "response": response,
            "error": None,
        }
        (self._output if status == 200 else self._errors).append(orjson.dumps(entry) + b"\n")

    def _save(self) -> None:
        for kind, lines in (("output", self._output), ("error", self._errors)):
            if lines:
                name = f"{self.id}_{kind}.jsonl"
                file = StoredFile(name, "batch_output", b"".join(lines))
                self._files.add(file)
                self._files_made[kind] = file.id

    def _mark(self, status: str, stage: str) -> None:
        self._status = status
        self._times[stage] = int(time.time())


class BatchRoutes:
    """Creating, watching, listing and cancelling; the oldest batches are forgotten first."""

    def __init__(self, files: FileStore, run: Run) -> None:
        self._files = files
        self._run = run
        self._batches: OrderedDict[str, Batch] = OrderedDict()

    def routes(self) -> list[Route]:
        """What this part answers."""
        return [
            Route("POST", "/v1/batches", self._create),
            Route("GET", "/v1/batches", self._list),
            Route("GET", "/v1/batches/{}", self._get),
            Route("POST", "/v1/batches/{}/cancel", self._cancel),
        ]

    def _create(self, exchange: Exchange) -> None:
        request = read_json(exchange.request, BatchRequest)
        if request.endpoint not in _ENDPOINTS:
            message = f"endpoint must be one of {', '.join(_ENDPOINTS)}"
            raise RequestRefused(message, kind=_KIND, param="endpoint")
        lines = _lines(self._files.find(request.input_file_id).data, request.endpoint)
        batch = Batch(request, lines, self._files, self._run)
        self._batches[batch.id] = batch
        if len(self._batches) > _REMEMBERED:
            self._batches.popitem(last=False)[1].cancel()
        batch.start()
        respond_json(exchange, batch.json())

    def _list(self, exchange: Exchange) -> None:
        batches = reversed(self._batches.values())
        respond_json(exchange, listing([batch.json() for batch in batches]))

    def _get(self, exchange: Exchange, batch_id: str) -> None:
        respond_json(exchange, self._find(batch_id).json())

    def _cancel(self, exchange: Exchange, batch_id: str) -> None:
        batch = self._find(batch_id)
        batch.cancel()
        respond_json(exchange, batch.json())

    def _find(self, batch_id: str) -> Batch:
        batch = self._batches.get(batch_id)
        if batch is None:
            raise not_found("Batch", batch_id)
        return batch


def _lines(data: bytes, endpoint: str) -> list[BatchLine]:
    """The requests of an input file. Raises RequestRefused."""
    try:
        lines = [msgspec.json.decode(line, type=BatchLine) for line in data.splitlines() if line]
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestRefused(f"input file: {error}", kind=_KIND, param="input_file_id") from error
    if not 1 <= len(lines) <= _MAX_LINES:
        raise RequestRefused(f"an input file has 1 to {_MAX_LINES} lines", kind=_KIND)
    if any(line.url != endpoint for line in lines):
        raise RequestRefused(f"every url must be {endpoint}", kind=_KIND, param="input_file_id")
    return lines
