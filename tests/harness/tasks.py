"""Loops of the product that run while a test looks at their effects."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def running_task(
    loop_of: Callable[[], Awaitable[None]], *, name: str | None = None
) -> AsyncIterator[None]:
    """Run a loop in a task of its own, and cancel the task at the end. The loop must not end by itself."""

    async def run() -> None:
        await loop_of()

    task = asyncio.create_task(run(), name=name)
    try:
        yield
        assert not task.done(), "the process would end"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
