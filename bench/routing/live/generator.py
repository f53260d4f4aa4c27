"""Sends a workload to a gateway on the real clock, and records the result of each request in the simulator's
own records.

The workload is the same object that a simulated fleet runs. So the same code decides when each request is
due, and what a user says after an answer. Times count from the due moment. `Health` says how late the
generator itself was.
"""

import asyncio
import contextlib
import heapq
import itertools
import time
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import msgspec

from bench.load.figures import Samples
from bench.load.sse import AnswerError, read_answer
from bench.routing.live.words import prompt_of
from epp.config.policy import DEFAULT_POLICY
from model_server.sim.fleet import Outcome, Workload
from model_server.sim.request import Record, SimRequest

_ENCODE: Final = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Sent:
    """All requests of a run."""

    records: list[Record] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    lag_s: Samples = field(default_factory=Samples)
    """How late requests were sent."""
    prompt_bytes: int = 0
    """Bytes of the prompts that were answered."""
    prompt_tokens: int = 0
    """Tokens of the same prompts, as the servers count them."""
    ended_s: float = 0.0


class Generator:
    """Sends the requests of one run, and records their answers."""

    def __init__(
        self,
        workload: Workload,
        *,
        url: str,
        model: str,
        session: aiohttp.ClientSession,
    ) -> None:
        """Prompts are English words, for a real tokenizer. The tokenizer may make more or fewer tokens of
        them than the workload says, and the server's count is used.
        """
        self._workload = workload
        self._url = f"{url}/v1/completions"
        self._model = model
        self._session = session
        self._started_at = 0.0
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, SimRequest]] = []
        self._open = 0
        self._changed = asyncio.Event()
        self._answers: dict[int, str] = {}
        self.sent = Sent()

    async def run(self, *, horizon_s: float) -> Sent:
        """Run until all requests are answered, or until the horizon. Requests that are open then are cut and
        have no end.
        """
        self._started_at = time.monotonic()
        for when, request in self._workload.start():
            self._plan(when, request)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(horizon_s), asyncio.TaskGroup() as group:
                while self._due or self._open:
                    await self._next(group)
        self.sent.ended_s = self._clock()
        return self.sent

    def _clock(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self._started_at

    def _plan(self, when: float, request: SimRequest) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), request))
        self._changed.set()

    async def _next(self, group: asyncio.TaskGroup) -> None:
        """Send the requests that are due. Then wait for the next due moment, or for an end, which may plan an
        earlier request.
        """
        while self._due and self._due[0][0] <= self._clock():
            due_s, _, request = heapq.heappop(self._due)
            self._open += 1
            group.create_task(self._one(request, due_s))
        self._changed.clear()
        wait_s = self._due[0][0] - self._clock() if self._due else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._changed.wait()

    async def _one(self, request: SimRequest, due_s: float) -> None:
        record = Record(request=request, arrived_s=due_s, num_prompt_tokens=request.num_prompt_tokens)
        self.sent.records.append(record)
        prompt = prompt_of(request.segments, answers=self._answers)
        body = _ENCODE(completion(self._model, prompt, answer_tokens=request.answer.num_tokens))
        self.sent.lag_s.add(max(0.0, self._clock() - due_s))
        try:
            await self._exchange(request, record, body)
            self.sent.prompt_bytes += len(prompt.encode())
            self.sent.prompt_tokens += record.num_prompt_tokens
        except (AnswerError, aiohttp.ClientError, OSError) as error:
            record.failed, record.ended_s = True, self._clock()
            self.sent.failures.append(f"request {request.request_id}: {error!r}")
        now = record.ended_s
        assert now is not None
        self._open -= 1
        for when, following in self._workload.after(record, now=now):
            self._plan(when, following)
        self._changed.set()

    async def _exchange(self, request: SimRequest, record: Record, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        if request.session:
            headers[DEFAULT_POLICY.spec.session_header] = request.session
        pieces: list[tuple[float, bytes]] = []
        async with self._session.post(self._url, data=body, headers=headers) as response:
            while piece := await response.content.readany():
                pieces.append((self._clock(), piece))
                if record.first_token_s is None and b'"text"' in piece:
                    record.first_token_s = pieces[-1][0]
            if response.status != 200:
                raise AnswerError(f"status {response.status}", repr(b"".join(p for _, p in pieces)[:200]))
        answer = read_answer(pieces)
        record.num_prompt_tokens = answer.prompt_tokens
        if answer.output_tokens != request.answer.num_tokens:
            raise AnswerError("another size", f"{answer.output_tokens} tokens of {request}")
        record.first_token_s, record.ended_s = answer.first_token_at, answer.last_token_at
        record.num_cached_tokens = answer.cached_tokens
        self._answers[request.answer.segment_id] = answer.text


def completion(model: str, prompt: str, *, answer_tokens: int) -> dict[str, Any]:
    """Return the body of a request. The answer has exactly this many tokens."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": answer_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def outcome_of(sent: Sent) -> Outcome:
    """Return the result in the simulator's terms. Values that only a server or the simulator knows (adapter
    loads, preemptions, the spread of the load) stay 0.
    """
    seen = [record for record in sent.records if record.num_cached_tokens is not None]
    return Outcome(
        records=sent.records,
        ended_s=sent.ended_s,
        load_cov=0.0,
        adapter_loads=0,
        preemptions=0,
        query_tokens=sum(record.num_prompt_tokens for record in seen),
        hit_tokens=sum(record.num_cached_tokens or 0 for record in seen),
    )
