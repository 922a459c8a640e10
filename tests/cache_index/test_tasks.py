"""Tasks end even where a cancellation gets lost."""

from __future__ import annotations

import asyncio

from cache_index.tasks import end


async def test_a_task_that_swallows_its_first_cancellation_ends_all_the_same() -> None:
    swallowed = 0

    async def loop() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 3:
                    raise

    tasks = [asyncio.create_task(loop())]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await end(*tasks)
    assert swallowed == 3


async def test_how_a_task_ended_does_not_matter() -> None:
    async def fail() -> None:
        raise ValueError

    failed = asyncio.create_task(fail())
    await asyncio.wait([failed])
    await end(failed)
    await end()
