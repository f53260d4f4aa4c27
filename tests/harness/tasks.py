"""Loops of the product that run while a test looks at their effects."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def running_task(loop_of: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run a loop in a task of its own, and cancel the task at the end."""

    async def run() -> None:
        await loop_of()

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
