"""The part of a Redis client with which a stored table is read."""

from __future__ import annotations

import asyncio


class FakeRedis:
    """Holds one value, which may differ from call to call: the last of `values` stays."""

    def __init__(self, *values: bytes) -> None:
        self.values = values
        self.asked: list[int] = []
        """The sizes that were asked for, in bytes."""

    async def getrange(self, _: str, start: int, end: int) -> bytes:
        await asyncio.sleep(0)  # as over a network; the loop forgets cancelled timers only when it runs
        value = self.values[min(len(self.asked), len(self.values) - 1)]
        self.asked.append(end + 1 - start)
        return value[start : end + 1]
