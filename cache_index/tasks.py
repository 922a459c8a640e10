"""Work that goes on whatever happens to it, and ending it for certain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

__all__ = ["end", "for_ever"]

_AGAIN_S = 0.2
_BACKOFF_S = (0.2, 10.0)


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


async def for_ever(
    work: Callable[[], Awaitable[None]], failed: Callable[[Exception], None]
) -> None:
    """Do `work` again each time it ends, with longer and longer pauses unless it lasted.

    `failed` is told each error by itself, also where a TaskGroup has put several into one.
    """
    pause_s = _BACKOFF_S[0]
    while True:
        started_s = time.monotonic()
        try:
            await work()
        except* Exception as group:
            for error in group.exceptions:
                failed(error)
        if time.monotonic() - started_s > _BACKOFF_S[1]:
            pause_s = _BACKOFF_S[0]
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, _BACKOFF_S[1])
