"""Runs the engine in real time: begins a step, waits as long as it takes, finishes it, hands out the tokens.

One task owns the loop; handlers submit and abort from the same thread, between steps or while one is being waited
for, which the engine allows. With nothing to do the loop sleeps on an event and wakes for nobody.

Steps are timed from when the one before was due, not from when the process woke up, so that a busy machine's late
wake-ups do not make the modelled server slower; a lag over `_MAX_LAG_S` is forgotten instead of being caught up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from model_server.core.engine import Engine, TokenOutput
from model_server.core.request import FinishReason, Request, RequestId
from model_server.server.errors import DrainingError, EngineStoppedError, QueueFullError
from model_server.server.metrics import Metrics
from model_server.server.replies import Delta
from model_server.text.tokenizer import Tokenizer

_MAX_LAG_S = 0.05


class Mailbox:
    """Where one HTTP request receives the text of its choices; one reader."""

    __slots__ = ("_arrived", "_closed", "_deltas")

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._closed = False
        self._arrived = asyncio.Event()

    def put(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._arrived.set()

    def close(self) -> None:
        """Nothing more will come: `take` raises once it has handed out what is there."""
        self._closed = True
        self._arrived.set()

    async def take(self) -> list[Delta]:
        """Everything that has arrived, at least one. EngineStoppedError when nothing will."""
        await self._arrived.wait()
        taken, self._deltas = self._deltas, []
        if not taken:
            raise EngineStoppedError
        if not self._closed:
            self._arrived.clear()
        return taken


@dataclass(slots=True)
class _Receiver:
    mailbox: Mailbox
    index: int
    stream_interval: int | None
    """Tokens in one delta; None: all of them, when the request has ended."""
    pieces: list[str] = field(default_factory=list)


class EngineDriver:
    def __init__(
        self,
        engine: Engine,
        *,
        tokenizer: Tokenizer,
        metrics: Metrics,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        max_waiting: int,
        stream_interval: int,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock
        self._sleep = sleep
        self._max_waiting = max_waiting
        self._stream_interval = stream_interval
        self._receivers: dict[RequestId, _Receiver] = {}
        self._work = asyncio.Event()
        self.draining = False

    def submit(self, requests: Sequence[Request], mailbox: Mailbox, *, stream: bool) -> None:
        """Queue all requests of one HTTP request, or none: QueueFullError, DrainingError."""
        if self.draining:
            raise DrainingError("The server is shutting down.")
        waiting = len(self._engine.scheduler.waiting)
        if waiting + len(requests) > self._max_waiting:
            raise QueueFullError(f"{waiting} requests wait already, and at most {self._max_waiting} may.")
        for index, request in enumerate(requests):
            self._engine.add(request)
            interval = self._stream_interval if stream else None
            self._receivers[request.request_id] = _Receiver(mailbox, index, interval)
            if request.adapter is not None:
                self._metrics.adapter_requested()
        self._metrics.lora_activity(self._engine.scheduler)
        self._work.set()

    def abort(self, requests: Sequence[Request]) -> None:
        """Nobody waits for these any more; those that have ended already are left alone."""
        for request in requests:
            if self._engine.abort(request.request_id) is not None:
                del self._receivers[request.request_id]
                self._metrics.request_aborted()
        self._metrics.lora_activity(self._engine.scheduler)

    async def run(self) -> None:
        """The loop. It ends only by cancellation or a fault, and then nobody is left waiting."""
        try:
            await self._run()
        finally:
            self.draining = True
            for receiver in self._receivers.values():
                receiver.mailbox.close()

    async def _run(self) -> None:
        due_s = self._clock()
        while True:
            if not self._engine.num_unfinished:
                self._work.clear()
                await self._work.wait()
                due_s = self._clock()
            now = self._clock()
            plan = self._engine.begin(now=now)
            self._metrics.step_began(plan, self._engine.scheduler)
            result = self._engine.runner.execute(plan)
            due_s = max(due_s, now - _MAX_LAG_S) + result.duration_s
            await self._sleep(max(0.0, due_s - self._clock()))
            now = self._clock()
            outputs = self._engine.finish(plan, result, now=now)
            self._metrics.step_finished(outputs, self._engine.scheduler, now=now)
            for output in outputs:
                self._deliver(output)

    def _deliver(self, output: TokenOutput) -> None:
        request = output.request
        receiver = self._receivers[request.request_id]
        if request.finish_reason is not FinishReason.STOP:  # the end marker is not shown
            receiver.pieces.append(self._tokenizer.decode(output.token_id))
        ended = request.finish_reason is not None
        interval = receiver.stream_interval
        # The first token goes out at once, whatever the interval: it is the one a client waits for.
        due = interval is not None and (request.num_output_tokens - 1) % interval == 0
        if not ended and not due:
            return
        receiver.mailbox.put(Delta(receiver.index, "".join(receiver.pieces), request.finish_reason))
        receiver.pieces.clear()
        if ended:
            del self._receivers[request.request_id]
