"""Routes that explain decisions: receipts of requests, and what would be done with one."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse

from router.admin import guard
from router.call import CLIENT_LEFT
from router.config import Settings
from router.errors import ClientGone, NoReceipt
from router.explainer import Explainer
from router.prompt import CHAT_PATH
from router.receipt import receipt, summary
from router.receipts import Receipts

MAX_LISTED = 1000


def decision_routes(settings: Settings, receipts: Receipts, explainer: Explainer) -> APIRouter:
    """The routes, guarded as all of /admin is."""
    router = APIRouter(prefix="/admin", dependencies=[Depends(guard(settings))])

    @router.get("/decisions")
    async def list_decisions(
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 50,
        replica: str | None = None,
        model: str | None = None,
    ) -> dict[str, Any]:
        """The last requests, the newest first: those that run, then those that have ended."""
        found = (
            each
            for each in receipts.newest_first()
            if replica in (None, each.replica) and model in (None, each.model)
        )
        listed = [summary(each) for each in islice(found, limit)]
        return {"kept": len(receipts), "limit": receipts.limit, "decisions": listed}

    @router.get("/decisions/{request_id:path}")
    async def get_decision(request_id: str) -> dict[str, Any]:
        """One request's receipt; of several with this id the latest."""
        known = receipts.of(request_id.encode("latin-1", "replace"))
        if not known:
            raise NoReceipt(request_id, receipts.limit)
        unit_tokens = settings.base_unit_tokens
        return receipt(known[0], settings.policy, unit_tokens, known=len(known))

    @router.post("/explain", openapi_extra=_BODY)
    async def explain(request: Request, path: str = CHAT_PATH) -> Response:
        """What would be done now with the body, sent to `path`; nothing is sent."""
        try:
            answer = await explainer.explain(path, request.scope, request.receive)
        except ClientGone:
            return Response(status_code=CLIENT_LEFT)
        return JSONResponse(answer)

    return router


_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}
