"""The part of a Redis client that the reader of a stored table calls."""

from __future__ import annotations

import asyncio


class FakeRedis:
    """Holds one value. Each call reads the next of `values`. After the last one the value stays the same."""

    def __init__(self, *values: bytes) -> None:
        self.values = values
        self.asked: list[int] = []
        """The sizes that were asked for, in bytes."""

    async def getrange(self, _: str, start: int, end: int) -> bytes:
        # A network takes time too. The loop forgets cancelled timers only when it runs.
        await asyncio.sleep(0)
        value = self.values[min(len(self.asked), len(self.values) - 1)]
        self.asked.append(end + 1 - start)
        return value[start : end + 1]

    async def xrevrange(self, _: str, *, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        newest: dict[bytes, bytes] = {}
        return [(b"9-1", newest)][:count]
