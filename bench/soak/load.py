"""Runs the clients of a soak run: they send usual requests, leave in the middle of answers, and send hostile
bodies.
"""

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from tests.harness.client import Client

_TIMEOUT_S: Final = 60.0
_LONGEST_PAUSE_S: Final = 0.1
_PATHS: Final = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings")
_NOT_READY: Final = b"no model server is ready"  # a server that does not list its models may have any
_HOSTILE: Final = (
    *(b"", b"{", b"null", b"[]", b'{"model":1}', b'{"prompt":"\\ud800"}'),
    *(b"\xff" * 5_000, b"[" * 20_000, b'{"a":' * 20_000),
    b'{"model":"m","prompt":[' + b"1e-310," * 3_000 + b"0]}",
    b'{"model":"m","messages":[' + b'{"type":""},' * 3_000 + b"{}]}",
    b'{"model":"' + b"m" * 50_000 + b'","prompt":"x"}',
    b'{"model":"m","cache_salt":"' + b"s" * 50_000 + b'","prompt":"x"}',
    b'{"model":"m","input":[' + b"[]," * 10_000 + b"[]]}",
)


@dataclass(slots=True)
class RequestCounts:
    """Counts requests by their results."""

    sent: Counter[str] = field(default_factory=Counter)
    attacker: str = "none"
    """The attacker of this moment."""
    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """How long the usual requests took, by attacker."""
    failed: Counter[str] = field(default_factory=Counter)
    """Usual requests without a complete 200, and hostile requests that got a 5xx, by attacker."""
    examples: list[str] = field(default_factory=list)

    def fail(self, why: str, *, attacker: str) -> None:
        self.failed[attacker] += 1
        if not attacker.startswith("sick") and len(self.examples) < 5:
            self.examples.append(why)

    @property
    def faults(self) -> int:
        """Failed requests, without those whose client saw the error of the sick server that it met."""
        return sum(n for attacker, n in self.failed.items() if not attacker.startswith("sick"))


async def user(client: Client, seen: RequestCounts, *, number: int, stop: asyncio.Event) -> None:
    """Run one client until `stop` is set."""
    rng = random.Random(number)
    kinds = (usual, usual, usual, streamed, abandoned, abandoned, hostile, hostile)
    while not stop.is_set():
        kind = rng.choice(kinds)
        name, attacker = kind.__name__, seen.attacker
        seen.sent[name] += 1
        began = time.monotonic()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                why = await kind(client, rng)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
        if kind is usual:
            seen.seconds[attacker].append(time.monotonic() - began)
        if why:
            sick = seen.attacker.startswith("sick")  # the server may have fallen sick meanwhile
            seen.fail(f"{name}: {why}", attacker=seen.attacker if sick else attacker)
        await asyncio.sleep(rng.uniform(0, _LONGEST_PAUSE_S))


def prompt(rng: random.Random) -> str:
    """Return a prompt of one of a few conversations, each at some turn."""
    conversation = rng.randrange(40)
    return f"conversation {conversation} " + f"said {conversation} and so on " * rng.choice((5, 40, 300))


async def usual(client: Client, rng: random.Random) -> str:
    reply = await client.complete(prompt(rng))
    whole = reply.status == 200 and b"choices" in reply.body
    return "" if whole else f"status {reply.status}: {reply.body[:200]!r}"


async def streamed(client: Client, rng: random.Random) -> str:
    async with client.stream(prompt(rng)) as reply:
        body = await reply.rest()
        whole = reply.status == 200 and body.endswith(b"[DONE]\n\n") and b"choices" in body
        return "" if whole else f"status {reply.status}, ends in {body[-60:]!r}"


async def abandoned(client: Client, rng: random.Random) -> str:
    """Send a request whose client leaves after the first piece of the answer, or before it."""
    async with client.stream(prompt(rng)) as reply:
        if rng.random() < 0.5:
            await reply.piece()
        reply.abort()
        return "" if reply.status == 200 else f"status {reply.status}"


async def hostile(client: Client, rng: random.Random) -> str:
    body = rng.choice(_HOSTILE)
    if rng.random() < 0.3:
        document = json.dumps({"model": "m", "prompt": prompt(rng)}).encode()
        at = rng.randrange(len(document))
        body = document[:at] + rng.randbytes(3) + document[at + 3 :]
    path = rng.choice(_PATHS)
    reply = await client.request("POST", path, body=body, headers={"content-type": "application/json"})
    if reply.status < 500 or _NOT_READY in reply.body:
        return ""
    return f"{path} {body[:40]!r}: status {reply.status}: {reply.body[:100]!r}"
