"""Every data route: what kind of request it is, how its prompt is read, what shape its errors have.

generate   JSON; placed by its prompt's cached prefix
model      JSON; placed by load among the replicas that serve its model
upload     a form, streamed through; its `model` field chooses the replicas
object     about something a replica keeps (a response, file or batch): goes back to its owner
other      anything else under /v1: by its `model` where it has one, else to any replica
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from router.engines import EngineKind
from router.errors import Shape
from router.prompt import CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, RESPONSES_PATH


class Kind(StrEnum):
    """How a request is planned; see the module's table."""

    GENERATE = "generate"
    MODEL = "model"
    UPLOAD = "upload"
    OBJECT = "object"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Route:
    """One data route. `makes` says that its answers name objects their replica keeps.

    `repeatable`: a replica that took the request and broke off may be replaced by another, because
    nothing but an answer is made. `token_mark` is in the first event of a stream that carries a
    token; the events before it say only that the request was taken. `engine`: the one kind that
    knows the route, asked where the fleet has it. `listed`: the gateway answers a GET itself, with
    one list out of all replicas' lists.
    """

    path: str
    kind: Kind
    summary: str
    methods: tuple[str, ...] = ("POST",)
    shape: Shape = Shape.OPENAI
    makes: bool = False
    repeatable: bool = True
    token_mark: bytes = b""
    engine: EngineKind | None = None
    listed: bool = False


ANY_METHOD = ("GET", "POST", "PUT", "PATCH", "DELETE")


def _model(
    *paths: str, shape: Shape = Shape.OPENAI, engine: EngineKind | None = None
) -> list[Route]:
    summary = "Answered by a replica that serves the named model, chosen by load."
    return [Route(path, Kind.MODEL, summary, shape=shape, engine=engine) for path in paths]


def _object(path: str, *, makes: bool = True) -> Route:
    summary = "Answered by the replica that made the object."
    shape = Shape.RESPONSES if path.startswith(RESPONSES_PATH) else Shape.OPENAI
    return Route(
        path, Kind.OBJECT, summary, methods=ANY_METHOD, shape=shape, makes=makes, repeatable=False
    )


OTHER = Route("/v1/{rest:path}", Kind.OTHER, "Passed to a replica as it is.",
              methods=(*ANY_METHOD, "OPTIONS"), repeatable=False)  # fmt: skip
"""The catch-all."""

ROUTES: tuple[Route, ...] = (
    Route(CHAT_PATH, Kind.GENERATE, "Chat completion; the body goes to a replica unchanged."),
    Route(COMPLETIONS_PATH, Kind.GENERATE, "Text completion; the same."),
    Route(RESPONSES_PATH, Kind.GENERATE, "Response; one that continues another goes to its owner.",
          shape=Shape.RESPONSES, makes=True, token_mark=b".delta"),
    Route(MESSAGES_PATH, Kind.GENERATE, "Anthropic message.", shape=Shape.ANTHROPIC,
          token_mark=b"content_block_delta"),
    *_model("/v1/messages/count_tokens", shape=Shape.ANTHROPIC),
    *_model("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
    *_model("/pooling", "/classify", "/tokenize", "/detokenize"),
    *_model("/generate", engine=EngineKind.SGLANG),
    Route("/v1/audio/transcriptions", Kind.UPLOAD, "Speech to text; streamed through."),
    Route("/v1/audio/translations", Kind.UPLOAD, "Speech to English text; streamed through."),
    Route("/v1/files", Kind.UPLOAD, "Store a file on a replica, which then owns it.",
          makes=True, repeatable=False, listed=True),
    Route("/v1/batches", Kind.OBJECT, "Start a batch where its input file is.",
          makes=True, repeatable=False, listed=True),
    _object("/v1/responses/{object_id}"),
    _object("/v1/responses/{object_id}/{rest:path}"),
    _object("/v1/files/{object_id}"),
    _object("/v1/files/{object_id}/{rest:path}", makes=False),  # a file may say anything
    _object("/v1/batches/{object_id}"),
    _object("/v1/batches/{object_id}/{rest:path}"),
    OTHER,
    Route("/get_server_info", Kind.OTHER, "SGLang's description of one replica.",
          methods=("GET",), engine=EngineKind.SGLANG),
    Route("/get_model_info", Kind.OTHER, "SGLang's description of its model.",
          methods=("GET",), engine=EngineKind.SGLANG),
)  # fmt: skip
"""In order of precedence: the catch-all comes after what it would catch under /v1."""
