"""Sends a workload to the gateway as its users would, and measures the times of the answers.

A closed loop: each user waits for the answer, thinks, and asks again. There is one connection for each
request in flight. Streamed answers are kept as raw pieces and read once at the end, because the client shares
two cores with everything that it measures.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

import aiohttp
import msgspec

from bench.demo.workload import Turn, User, Workload
from bench.load.sse import AnswerError, read_answer

_ENCODE: Final = msgspec.json.Encoder().encode
_TENANT_HEADER: Final = "x-llm-d-inference-fairness-id"
"""Header that names the tenant of a request. Recordings show the tenant, and flow control uses it if it is
on.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request."""

    ttft_s: float
    """Seconds from sending to the first token. The headers come long before."""
    text: str
    request_id: str
    failure: str = ""
    """The reason why the request failed. It is empty if the request did not fail."""


@dataclass(slots=True)
class Run:
    """The progress of one run of the workload."""

    total: int
    started_at: float
    sent: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    """Times of the counted requests: those that were answered and are not the first of their user."""
    done: int = 0
    failures: list[str] = field(default_factory=list)
    last_request_id: str = ""

    @property
    def in_flight(self) -> int:
        return self.sent - self.done

    def note(self, answer: Answer, *, counts: bool) -> None:
        self.done += 1
        if answer.failure:
            self.failures.append(answer.failure)
            return
        self.last_request_id = answer.request_id or self.last_request_id
        if counts:
            self.ttfts_s.append(answer.ttft_s)


async def drive(
    workload: Workload, run: Run, *, url: str, nonce: str, session: aiohttp.ClientSession
) -> None:
    """Send all requests of the workload. `run` shows the progress."""
    async with asyncio.TaskGroup() as group:
        for user in workload.users:
            group.create_task(_live(workload, user, run, url=url, nonce=nonce, session=session))


async def _live(
    workload: Workload, user: User, run: Run, *, url: str, nonce: str, session: aiohttp.ClientSession
) -> None:
    """Send the requests of one user, from the first to the last."""
    first = True
    for conversation in user.conversations:
        history: list[tuple[str, str]] = []
        for turn in conversation:
            await asyncio.sleep(turn.think_s)
            run.sent += 1
            answer = await ask(
                session,
                f"{url}/v1/chat/completions",
                _ENCODE(workload.body(user, history, turn, nonce=nonce)),
                tenant=f"tenant-{user.tenant}",
            )
            run.note(answer, counts=not first)
            first = False
            history = _continued(history, turn, answer)


def _continued(history: list[tuple[str, str]], turn: Turn, answer: Answer) -> list[tuple[str, str]]:
    """Return the conversation with this turn. A turn that failed is left out."""
    return history if answer.failure else [*history, (turn.message, answer.text)]


async def ask(session: aiohttp.ClientSession, url: str, body: bytes, *, tenant: str = "") -> Answer:
    """Send one streamed chat request. Errors are stored in the answer and never raised."""
    started = time.monotonic()
    headers = {"content-type": "application/json"} | ({_TENANT_HEADER: tenant} if tenant else {})
    pieces: list[tuple[float, bytes]] = []
    try:
        async with session.post(url, data=body, headers=headers) as response:
            request_id = response.headers.get("x-request-id", "")
            while piece := await response.content.readany():
                pieces.append((time.monotonic(), piece))
            status = response.status
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return Answer(0.0, "", "", failure=f"{type(error).__name__}: {error}")
    if status != 200:
        beginning = b"".join(piece for _, piece in pieces)[:200].decode(errors="replace")
        return Answer(0.0, "", request_id, failure=f"status {status}: {beginning}")
    try:
        answer = read_answer(pieces)
    except AnswerError as error:
        return Answer(0.0, "", request_id, failure=str(error))
    return Answer(answer.first_token_at - started, answer.text, request_id)
