"""Runs the engine in real time: begins a step, waits as long as the step takes, finishes the step, and hands
out the tokens.

One task owns the loop. Handlers submit and abort from the same thread, between steps or during a step, which
the engine allows. If there is nothing to do, the loop sleeps on an event.

The time of a step counts from when the step before was due, not from when the process woke up. So late
wake-ups on a busy machine do not make the modelled server slower. A lag over `_MAX_LAG_S` is not made up
for.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from model_server.core.engine import Engine, StepResult, TokenOutput
from model_server.core.request import FinishReason, Request, RequestId, TokenId
from model_server.core.scheduler import StepPlan
from model_server.server.errors import ApiError, DrainingError, EngineStoppedError, QueueFullError
from model_server.server.metrics import Metrics
from model_server.server.replies import Delta, TokenReport
from model_server.server.staging import Staging
from model_server.server.stops import StopFilter, StopRule
from model_server.text.language import Detokenizer, Language, UnknownTokenError

_MAX_LAG_S = 0.05


class Mailbox:
    """The queue from which one HTTP request takes the text of its choices. A mailbox has one reader."""

    __slots__ = ("_arrived", "_closed", "_deltas")

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._closed = False
        self._arrived = asyncio.Event()

    def put(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._arrived.set()

    def close(self) -> None:
        """Close the mailbox: `take` raises after it has returned the remaining items."""
        self._closed = True
        self._arrived.set()

    async def take(self) -> list[Delta]:
        """Return all items that have arrived, at least one. Raise EngineStoppedError if no item will come."""
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
    """The number of tokens in one delta. None means that all tokens come when the request has ended."""
    filter: StopFilter | None
    text: Detokenizer
    reports: list[TokenReport] | None
    """The log probabilities of the tokens since the last delta. None means that the client wants none."""
    pieces: list[str] = field(default_factory=list)


class EngineDriver:
    def __init__(
        self,
        engine: Engine,
        *,
        language: Language,
        metrics: Metrics,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        max_waiting: int,
        stream_interval: int,
        compute: Callable[[StepPlan], Awaitable[StepResult]] | None = None,
        staging: Staging | None = None,
    ) -> None:
        """`compute` runs the runner's `execute` outside the event loop's thread. None means that `execute`
        takes no time. `staging` fetches prefixes from a store below the cache. None means that there is no
        store.
        """
        self._engine = engine
        self._compute = compute
        self._staging = staging
        self._language = language
        self._metrics = metrics
        self._clock = clock
        self._sleep = sleep
        self._max_waiting = max_waiting
        self._stream_interval = stream_interval
        self._receivers: dict[RequestId, _Receiver] = {}
        self._work = asyncio.Event()
        if staging is not None:
            staging.on_ready = self._work.set
        self.draining = False
        self.publish_events: Callable[[], None] = lambda: None
        """Called between steps when the cache may have changed."""

    def submit(
        self,
        requests: Sequence[Request],
        mailbox: Mailbox,
        *,
        stream: bool,
        stops: StopRule | None = None,
    ) -> None:
        """Queue all requests of one HTTP request, or none. Raise QueueFullError, DrainingError, or ApiError
        if they could never run.
        """
        if self.draining:
            raise DrainingError("The server is shutting down; send the request to another server.")
        if len(requests) > self._max_waiting:
            raise ApiError(
                f"The request asks for {len(requests)} answers, but at most {self._max_waiting} may wait in this server; send several smaller requests.",
            )
        waiting = len(self._engine.scheduler.waiting)
        if waiting + len(requests) > self._max_waiting:
            raise QueueFullError(
                f"{waiting} requests wait already, and at most {self._max_waiting} may wait; try again later."
            )
        for index, request in enumerate(requests):
            self._engine.add(request)
            self._receivers[request.request_id] = _Receiver(
                mailbox,
                index,
                stream_interval=self._stream_interval if stream else None,
                filter=StopFilter(stops) if stops is not None else None,
                text=self._language.detokenizer(request.token_ids, constraint=request.constraint),
                reports=None if request.sampling.num_logprobs is None else [],
            )
            if request.adapter is not None:
                self._metrics.adapter_requested()
            if self._staging is not None:
                self._staging.submitted(request)
        self._metrics.lora_activity(self._engine.scheduler)
        self._work.set()

    def abort(self, requests: Sequence[Request]) -> None:
        """End these requests, since no client waits for them any more. Ended requests are ignored."""
        for request in requests:
            if self._engine.abort(request.request_id) is not None:
                del self._receivers[request.request_id]
                self._metrics.request_aborted()
        if self._staging is not None:
            self._staging.aborted()
        self._metrics.lora_activity(self._engine.scheduler)

    def reset_prefix_cache(self) -> None:
        """Forget all cached content and report this at once, since no step may come for long."""
        self._engine.reset_prefix_cache()
        self.publish_events()

    async def run(self) -> None:
        """Run the loop. The loop ends only by cancellation or a fault, and then no request is left
        waiting.
        """
        try:
            await self._run()
        finally:
            self.draining = True
            for receiver in self._receivers.values():
                receiver.mailbox.close()

    async def _run(self) -> None:
        due_s = self._clock()
        while True:
            while not self._engine.can_step:
                self._work.clear()
                await self._work.wait()
                due_s = self._clock()
            now = self._clock()
            plan = self._engine.begin(now=now)
            self._metrics.step_began(plan, self._engine.scheduler)
            result = await self._compute(plan) if self._compute else self._engine.runner.execute(plan)
            due_s = max(due_s, now - _MAX_LAG_S) + result.duration_s
            await self._sleep(max(0.0, due_s - self._clock()))
            now = self._clock()
            outputs = self._engine.finish(plan, result, now=now)
            self.publish_events()
            reasons = [self._read(output) for output in outputs]
            if self._staging is not None:
                self._staging.stepped(plan)
            self._metrics.step_finished(outputs, self._engine.scheduler, now=now)
            for output, reason in zip(outputs, reasons, strict=True):
                self._deliver(output, reason)

    def _read(self, output: TokenOutput) -> FinishReason | None:
        """Add the token's text to the next delta of its receiver. Return the finish reason if the answer ends
        with this token.
        """
        request = output.request
        receiver = self._receivers[request.request_id]
        # The end marker is not shown.
        ended_itself = request.finish_reason is FinishReason.STOP
        piece = "" if ended_itself else receiver.text.feed(output.token_id)
        if request.finish_reason is not None:
            piece += receiver.text.flush()
        if receiver.reports is not None and not ended_itself:
            receiver.reports.append(self._report(output))
        if receiver.filter is not None and request.num_output_tokens > request.sampling.min_tokens:
            piece = receiver.filter.feed(piece)
            if receiver.filter.stopped:
                if request.finish_reason is None:
                    self._engine.stop(request.request_id)
                receiver.pieces.append(piece)
                return FinishReason.STOP
            if request.finish_reason is not None:
                piece += receiver.filter.flush()
        receiver.pieces.append(piece)
        return request.finish_reason

    def _deliver(self, output: TokenOutput, reason: FinishReason | None) -> None:
        request = output.request
        receiver = self._receivers[request.request_id]
        ended = reason is not None
        interval = receiver.stream_interval
        # The first token is sent at once, whatever the interval, because the client waits for it.
        due = interval is not None and (request.num_output_tokens - 1) % interval == 0
        if not ended and not due:
            return
        reports = None if receiver.reports is None else tuple(receiver.reports)
        stop_reason: str | int | None = receiver.filter.stopped_by if receiver.filter is not None else None
        if stop_reason is None and reason is FinishReason.STOP:
            stop_reason = output.token_id if output.token_id in request.sampling.stop_token_ids else None
        receiver.mailbox.put(Delta(receiver.index, "".join(receiver.pieces), reason, reports, stop_reason))
        receiver.pieces.clear()
        if receiver.reports is not None:
            receiver.reports.clear()
        if ended:
            del self._receivers[request.request_id]

    def _report(self, output: TokenOutput) -> TokenReport:
        assert output.logprobs is not None, (
            "the runner gave no log probabilities for a token, but a client wants them"
        )
        top = tuple((self._text_of(TokenId(token)), logprob) for token, logprob in output.logprobs.top)
        return TokenReport(self._text_of(output.token_id), output.logprobs.logprob, top)

    def _text_of(self, token_id: TokenId) -> str:
        try:
            return self._language.decode([token_id])
        except UnknownTokenError:
            return ""  # some models have more token ids than their tokenizer knows
