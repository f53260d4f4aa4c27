"""Conversations at a steady rate, for tests in which the servers' caches matter: each turn begins with all
that was said before.

A picker that saw only some of a conversation's turns sends the next turn elsewhere, so the hits show what
pickers tell each other. All conversations have the same number of turns, and users are at different turns,
so hits do not change with time.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import aiohttp

from bench.load.prompts import text
from tests.cluster.steady_load import Phase, SteadyLoad, send_completion

TURNS: Final = 6
_TURN_TOKENS: Final = 300
_PAUSE_S: Final = 0.8


class Talks(SteadyLoad):
    """A number of users. Each has one conversation after the other. Made by `talks`."""

    @property
    def faults(self) -> list[str]:
        return [f"{phase.name}: {fault}" for phase in self.phases for fault in phase.faults]

    async def keep(self) -> None:
        """Run one user: one conversation after the other."""
        user = next(self._numbers)
        for talk in itertools.count():
            prompt = ""
            for turn in range(TURNS):
                prompt += text(f"{user} {talk} {turn}", _TURN_TOKENS) + "\n"
                if talk == 0 and turn < user % TURNS:
                    continue
                phase = self.phases[-1]
                phase.outcomes.append(
                    await send_completion(self._session, self._url, prompt, model=self._model)
                )
                self._finished.set()
                await asyncio.sleep(_PAUSE_S)


def recent(phase: Phase, count: int) -> Phase:
    """Return the last requests of a phase, as a phase of their own."""
    return Phase(f"the last of {phase.name}", outcomes=phase.outcomes[-count:])


@asynccontextmanager
async def talks(url: str, *, model: str, users: int) -> AsyncIterator[Talks]:
    """Run conversations. Their first phase fills the caches and is not counted."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        load = Talks(session, url, model=model)
        async with asyncio.TaskGroup() as group:
            with load.phase("first turns"):
                users_lives = [group.create_task(load.keep(), name=f"user {n}") for n in range(users)]
                await load.answers(users * TURNS)
            try:
                yield load
            finally:
                for life in users_lives:
                    life.cancel()
