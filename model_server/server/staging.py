"""Fetches the prefixes of requests from a store below the cache while the requests wait. The requests are
admitted after that.

A request is looked up when it is submitted. If the store has more of its prefix than the engine's blocks, the
request is marked as loading, so the scheduler skips it. The loader's thread fetches one prefix after the
other. A failed fetch does not affect the request, whose prompt is then computed like any other. When a
request has ended, its blocks are also given to the store.

Prefixes that are fetched and not yet admitted are bounded: at the limit, the next fetch waits until other
requests are admitted.

Everything here runs in the event loop's thread. Caller: the driver.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

from model_server.core.blocks import Block
from model_server.core.engine import Engine
from model_server.core.hashing import BlockHash
from model_server.core.request import FinishReason, LoadedPrefix, OutsidePrefix, Request
from model_server.core.scheduler import StepPlan
from model_server.tiers.status import StoreStatus

_log = logging.getLogger(__name__)


class Tiers(Protocol):
    """The store below the cache. `model_server.tiers.serving` implements it if torch is installed."""

    @property
    def approximation(self) -> str: ...
    def num_held(self, hashes: Sequence[BlockHash]) -> int: ...
    def fetch(
        self, hashes: Sequence[BlockHash], *, first_block: int
    ) -> LoadedPrefix | OutsidePrefix | None: ...
    def save(self, request: Request, table: Sequence[Block], *, num_tokens: int) -> None: ...
    def learn_from(self, request: Request) -> None: ...
    def status(self) -> StoreStatus: ...
    def close(self, *, timeout_s: float) -> None: ...


class Staging:
    def __init__(self, engine: Engine, tiers: Tiers, *, step_thread: Executor, staged_bytes: int) -> None:
        """`step_thread` runs the steps, one after the other, and work that is handed to it in between."""
        self._engine = engine
        self._tiers = tiers
        self._step_thread = step_thread
        self._staged_bytes = staged_bytes
        self.loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-store-loader")
        """Runs all reads of the store, one after the other. No other thread reads the store."""
        self._waiting: deque[Request] = deque()
        self._fetching: Request | None = None
        self._closed = False
        self.on_ready: Callable[[], None] = _do_nothing
        """Called when a request may be admitted that could not be admitted before."""

    def submitted(self, request: Request) -> None:
        """Look up a request that the engine has just got."""
        cached = self._engine.kv_cache.get_computed(request)
        usable = (len(request.token_ids) - 1) // self._engine.config.block_size_tokens
        if self._tiers.num_held(request.block_hashes[:usable]) > len(cached.blocks):
            request.loading = True
            self._waiting.append(request)
            self._fetch_next()

    def aborted(self) -> None:
        """Note that requests have ended early, which frees the room of their fetched prefixes. Without
        this call no fetch might follow, because there may be no further step.
        """
        self._fetch_next()

    def stepped(self, plan: StepPlan) -> None:
        """Store the requests that ended in a finished step. There may then be room for the next fetch."""
        if self._closed:
            return
        for chunk in plan.chunks:
            request = chunk.request
            if chunk.samples and chunk.start < request.num_prompt_tokens:
                _run_later(self.loader, partial(self._tiers.learn_from, request))
            if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                # The request's blocks are free, and keep their content until the next step, which the same
                # thread computes.
                blocks, num_tokens = tuple(chunk.table), request.num_computed_tokens
                save = partial(self._tiers.save, request, blocks, num_tokens=num_tokens)
                _run_later(self._step_thread, save)
        self._fetch_next()

    def status(self) -> StoreStatus:
        return self._tiers.status()

    async def close(self, *, timeout_s: float) -> None:
        """Write waiting blocks, as far as the time allows. Call this when no request is unfinished any
        more.
        """
        loop = asyncio.get_running_loop()
        # A request that still waits for its prefix may be computed later, but its blocks are not stored.
        self._closed = True
        self._waiting.clear()
        # Work is done in order, so after this call the step's thread has done all earlier work.
        await loop.run_in_executor(self._step_thread, _do_nothing)
        await loop.run_in_executor(self.loader, lambda: self._tiers.close(timeout_s=timeout_s))
        self.loader.shutdown()

    def _fetch_next(self) -> None:
        while self._waiting and self._fetching is None:
            request = self._waiting[0]
            if request.finish_reason is not None:
                self._waiting.popleft()
                continue
            staged = [waiting.stored for waiting in self._engine.scheduler.waiting]
            held = sum(stored.size_bytes for stored in staged if isinstance(stored, LoadedPrefix))
            if held and held >= self._staged_bytes:
                return
            self._waiting.popleft()
            self._fetching = request
            # The cache may now hold more or less of the prompt than when the request was submitted.
            first_block = len(self._engine.kv_cache.get_computed(request).blocks)
            usable = (len(request.token_ids) - 1) // self._engine.config.block_size_tokens
            hashes = tuple(request.block_hashes[:usable])
            fetch = partial(self._tiers.fetch, hashes, first_block=first_block)
            fetched = asyncio.get_running_loop().run_in_executor(self.loader, fetch)
            fetched.add_done_callback(partial(self._fetched, request))

    def _fetched(self, request: Request, done: asyncio.Future[LoadedPrefix | OutsidePrefix | None]) -> None:
        self._fetching = None
        request.loading = False
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            _log.error("a stored prefix could not be fetched; its tokens are computed again", exc_info=error)
        elif request.finish_reason is None:
            request.stored = done.result()
            if isinstance(request.stored, OutsidePrefix):
                request.approximate(self._tiers.approximation)
        self.on_ready()
        self._fetch_next()


def _run_later(thread: Executor, work: Callable[[], None]) -> None:
    """Run work whose result no caller waits for. A fault is only logged."""

    def done(future: Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            _log.error("work for the KV store failed", exc_info=error)

    thread.submit(work).add_done_callback(done)


def _do_nothing() -> None:
    """Do nothing. This is the default of `on_ready`."""
