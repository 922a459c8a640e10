"""Ending tasks for certain."""

from __future__ import annotations

import asyncio

__all__ = ["end"]

_AGAIN_S = 0.2


async def end(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks until they are done, whatever they end with.

    Once is not always enough: a library may turn the cancellation of a wait into an error of its
    own, and a TaskGroup (before Python 3.13) loses it if one of its tasks fails at that moment. A
    loop that goes on after errors would then go on for ever.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)
