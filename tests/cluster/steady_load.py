"""Keeps a fixed number of requests in flight. For each phase of a test it reports how the requests ended that
began in this phase. Clients open a connection for each request, as many small clients would: the test checks
whether new connections are refused and whether answers are cut. Prompts share long prefixes, so that prefix
caches matter. Half of the answers are streamed.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any, Final

import aiohttp
import pytest

from tests.cluster.installed import AT_LEAST_IN_FLIGHT, IN_FLIGHT, MODEL

ANSWER_TOKENS: Final = 24
_TENANTS: Final = 10
_PREFIX_WORDS: Final = 500
_TIMEOUT: Final = aiohttp.ClientTimeout(total=120)


@dataclass(frozen=True, slots=True)
class SentRequest:
    """The outcome of one request."""

    fault: str
    """Empty if the whole answer came."""
    seconds: float
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Phase:
    """The name of a phase, and the requests that began during it."""

    name: str
    seconds: float = 0.0
    outcomes: list[SentRequest] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        return [outcome.fault for outcome in self.outcomes if outcome.fault]

    @property
    def hit_ratio(self) -> float:
        """Share of the prompts' tokens that servers had in their caches."""
        prompts = sum(outcome.prompt_tokens for outcome in self.outcomes)
        return sum(outcome.cached_tokens for outcome in self.outcomes) / prompts if prompts else 0.0

    def row(self) -> str:
        took = [outcome.seconds for outcome in self.outcomes if not outcome.fault]
        tenths = quantiles(took, n=100) if len(took) > 1 else [0.0] * 99
        return (
            f"{self.name:34} {self.seconds:6.0f} {len(self.outcomes):9} {len(self.faults):7} "
            f"{tenths[49]:7.2f} {tenths[98]:7.2f} {self.hit_ratio:9.1%}"
        )


class SteadyLoad:
    """The load while it runs. Made by `steady_load`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.phases: list[Phase] = []
        self.in_flight = 0
        self.least_in_flight: int | None = None
        """Counted over the samples between the first moment and the last."""
        self._session = session
        self._url = url
        self._numbers = itertools.count()
        self._finished = asyncio.Event()

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Requests that begin in the block belong to this phase. Requests that were under way belong to the
        phase before.
        """
        phase = Phase(name)
        self.phases.append(phase)
        began_at = time.monotonic()
        try:
            yield phase
        finally:
            phase.seconds = time.monotonic() - began_at

    async def answers(self, count: int) -> None:
        """Wait until this many more requests have ended."""
        for _ in range(count):
            await self._finished.wait()
            self._finished.clear()

    async def keep(self) -> None:
        """Send one request after the other."""
        while True:
            self.in_flight += 1
            phase = self.phases[-1]
            phase.outcomes.append(await self._one(next(self._numbers)))
            self.in_flight -= 1
            self._finished.set()

    async def sample(self) -> None:
        """Note the number of requests in flight, ten times a second."""
        while True:
            await asyncio.sleep(0.1)
            least = self.in_flight if self.least_in_flight is None else self.least_in_flight
            self.least_in_flight = min(self.in_flight, least)

    async def _one(self, number: int) -> SentRequest:
        rng = random.Random(number)
        streamed = number % 2 == 0
        prompt = f"{prefix(rng.randrange(_TENANTS))} {number}"
        return await send_completion(self._session, self._url, prompt, streamed=streamed)

    def table(self) -> str:
        head = (
            f"{'while':34} {'s':>6} {'requests':>9} {'failed':>7} {'p50 s':>7} {'p99 s':>7} {'hit ratio':>9}"
        )
        return "\n".join([head, *(phase.row() for phase in self.phases)])

    def check(self, *, at_least: int) -> None:
        """Check that no request failed and that enough requests were in flight all the time."""
        faults = [f"{phase.name}: {fault}" for phase in self.phases for fault in phase.faults]
        assert not faults, "\n".join([f"{len(faults)} failed", *faults[:10], self.table()])
        assert self.least_in_flight is not None
        assert self.least_in_flight >= at_least
        idle = [phase.name for phase in self.phases if not phase.outcomes]
        assert not idle, f"no request began while: {idle}"


async def send_completion(
    session: aiohttp.ClientSession,
    url: str,
    prompt: str,
    *,
    streamed: bool = False,
    tokens: int = ANSWER_TOKENS,
) -> SentRequest:
    """Send one completion request and read the answer to its end."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "stream": streamed,
        "ignore_eos": True,
    }
    if streamed:
        body["stream_options"] = {"include_usage": True}
    began_at = time.monotonic()
    try:
        async with session.post(f"{url}/v1/completions", json=body, timeout=_TIMEOUT) as response:
            answer = await response.read()
            if response.status != 200:
                return SentRequest(f"{response.status} {answer[:200]!r}", time.monotonic() - began_at)
            usage = _usage(answer, streamed=streamed)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return SentRequest(repr(error), time.monotonic() - began_at)
    whole = usage["completion_tokens"] == tokens
    details = usage.get("prompt_tokens_details") or {}
    return SentRequest(
        "" if whole else f"an answer of {usage['completion_tokens']} tokens",
        time.monotonic() - began_at,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=details.get("cached_tokens", 0),
    )


def prefix(tenant: int) -> str:
    """Return some 500 words with which the prompts of this tenant begin."""
    words = random.Random(f"tenant {tenant}").choices(_WORDS, k=_PREFIX_WORDS)
    return " ".join(words)


def _usage(answer: bytes, *, streamed: bool) -> dict[str, Any]:
    """Return the token counts that the server reports. Raise ValueError if the answer is cut."""
    if not streamed:
        usage: dict[str, Any] = json.loads(answer)["usage"]
        return usage
    events = [line.removeprefix(b"data: ") for line in answer.splitlines() if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        raise ValueError(f"the stream was cut after {answer[-100:]!r}")
    last: dict[str, Any] = json.loads(events[-2])["usage"]
    return last


@asynccontextmanager
async def steady_load(
    connector: aiohttp.TCPConnector,
    url: str,
    *,
    capsys: pytest.CaptureFixture[str],
    in_flight: int = IN_FLIGHT,
    at_least: int = AT_LEAST_IN_FLIGHT,
    phase: str = "at rest",
) -> AsyncIterator[SteadyLoad]:
    """Run the load. `phase` names the phase in which the first requests begin. In the end the table is
    printed. A block that ended well then fails if a request did, or if fewer than `at_least` were in flight.
    """
    async with aiohttp.ClientSession(connector=connector) as session:
        load = SteadyLoad(session, url)
        with load.phase(phase):
            tasks = [asyncio.create_task(load.keep(), name=f"client {n}") for n in range(in_flight)]
            await load.answers(in_flight)
        tasks.append(asyncio.create_task(load.sample(), name="sampler"))
        try:
            yield load
            load.check(at_least=at_least)
        finally:
            with capsys.disabled():
                print(f"\n{load.table()}\n")
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            # A client that broke sent nothing afterwards: the load was then lower than the test claims.
            broken = [result for result in ended if isinstance(result, Exception)]
            if broken:
                raise ExceptionGroup("clients broke", broken)


_WORDS: Final[Sequence[str]] = tuple(
    a + b + c for a in ("ba", "di", "ko", "lu") for b in ("mer", "nas", "pol") for c in ("a", "en", "is", "o")
)
