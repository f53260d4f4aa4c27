"""Starts and stops the server. This is the composition root of `model-server serve`. SIGTERM and SIGINT drain
the server: the port closes, unfinished requests get at most `drain_timeout_s` to finish, and then the process
ends. A second signal ends the process at once. If the engine's loop fails, the whole server fails with it.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from model_server.core.cache_options import CacheOptions
from model_server.core.engine import Engine, EngineConfig
from model_server.core.request import NO_TOKEN, Adapter
from model_server.core.scheduler import SchedulerLimits
from model_server.server.app import Api
from model_server.server.backends import (
    DEFAULT_COST_BLOCKS,
    DEFAULT_HF_BLOCKS,
    Backend,
    CostSettings,
    HfSettings,
    made_up,
    real,
)
from model_server.server.driver import EngineDriver
from model_server.server.kv_events import KvEventLog
from model_server.server.kv_publisher import KvEventSettings, KvPublisher, open_publisher
from model_server.server.metrics import Metrics
from model_server.server.models import DEFAULT_MAX_ADAPTERS, ServedModels
from model_server.server.openai import RequestReader
from model_server.server.remote_prefill import KvTransferSettings, RemotePrefill
from model_server.server.sampling import SamplingReader
from model_server.server.staging import Staging
from model_server.tiers.settings import KvStoreSettings

_INTERRUPTED = 130
"""The exit status after Ctrl-C, which is the usual status of shells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    """The port. 0 means any free port."""
    port_file: Path | None = None
    model: str = "made-up"
    served_names: tuple[str, ...] = ()
    """The names of the model. Empty means the model's own name."""
    adapters: tuple[Adapter, ...] = ()
    max_adapters: int = DEFAULT_MAX_ADAPTERS
    """The most adapters loaded at the same time, including those given at the start."""
    allow_runtime_lora_updating: bool = False
    """True means that clients may load and unload adapters over HTTP."""
    num_blocks: int | None = None
    """The number of blocks. None means the backend's usual number."""
    block_size_tokens: int = 16
    enable_prefix_caching: bool = True
    max_model_len_tokens: int | None = None
    limits: SchedulerLimits
    backend: CostSettings | HfSettings
    max_waiting: int = 1024
    stream_interval: int = 1
    drain_timeout_s: float = 30.0
    max_body_bytes: int = 64 * 1024 * 1024
    cache: CacheOptions = field(default_factory=CacheOptions)
    prompt_cache_entries: int = 0
    kv_events: KvEventSettings | None = None
    kv_store: KvStoreSettings | None = None
    kv_transfer: KvTransferSettings | None = None
    """The settings by which servers compute prompts for each other. A request's header names the other
    server. None means that this server neither asks another server nor computes prompts for others.
    """

    def __post_init__(self) -> None:
        real = isinstance(self.backend, HfSettings)
        if self.prompt_cache_entries < 0:
            raise ValueError("--prompt-cache-size must not be negative; 0 keeps no prompts")
        if real and (self.adapters or self.allow_runtime_lora_updating):
            raise ValueError(
                "--lora and --allow-runtime-lora-updating name adapters of a made-up model only: give --runner cost"
            )
        if real and self.kv_transfer is not None:
            raise ValueError("--kv-transfer moves the blocks of a made-up model only: give --runner cost")
        if not real and self.kv_store is not None:
            raise ValueError("--kv-store keeps the KV of a real model: give --runner hf")
        if self.kv_store is not None and self.prompt_cache_entries:
            raise ValueError(
                "--kv-store and --prompt-cache-size cannot be used together: give only one of them"
            )
        for name, wanted in (
            ("--kv-store", self.kv_store),
            ("--kv-transfer", self.kv_transfer),
            ("--kv-events-endpoint", self.kv_events),
        ):
            if wanted is not None and not self.enable_prefix_caching:
                raise ValueError(f"{name} needs the prefix cache, which is switched off")
            if wanted is not None and self.cache.partial_blocks:
                raise ValueError(
                    f"{name} knows full blocks only, but --partial-blocks caches partial blocks, too"
                )


def _quietly(_: str) -> None:
    """Report no progress."""


class Server:
    """Holds all parts of the server. A new Server does not listen yet."""

    def __init__(self, settings: ServerSettings, *, progress: Callable[[str], None] = _quietly) -> None:
        hf = isinstance(settings.backend, HfSettings)
        num_blocks = settings.num_blocks or (DEFAULT_HF_BLOCKS if hf else DEFAULT_COST_BLOCKS)
        backend = self.backend = _backend(settings, num_blocks=num_blocks, progress=progress)
        names = settings.served_names or (settings.model,)
        self.models = ServedModels(
            names=names,
            root=settings.model,
            adapters=settings.adapters,
            max_adapters=settings.max_adapters,
        )
        self.engine = Engine(_engine_config(settings, backend, num_blocks=num_blocks), backend.runner)
        self.staging = _staging(self.engine, backend, settings.kv_store)
        metrics = Metrics(model_name=names[0], max_loras=settings.limits.max_loras, wall_clock=time.time)
        metrics.watch(self.engine, self.staging.status if self.staging is not None else None)
        self.kv_event_log: KvEventLog | None = None
        if settings.kv_events is not None:
            self.kv_event_log = self.engine.kv_cache.observer = KvEventLog(
                block_size_tokens=settings.block_size_tokens,
                buffer_batches=settings.kv_events.buffer_batches,
            )
        self.kv_publisher: KvPublisher | None = None
        """The publisher of KV events, while the server listens. None if the settings ask for no KV events."""
        self.driver = EngineDriver(
            self.engine,
            language=backend.language,
            metrics=metrics,
            clock=time.monotonic,
            sleep=asyncio.sleep,
            max_waiting=settings.max_waiting,
            stream_interval=settings.stream_interval,
            compute=backend.compute,
            staging=self.staging,
        )
        self.application = self._api(settings, metrics).application()

    def _api(self, settings: ServerSettings, metrics: Metrics) -> Api:
        reader = RequestReader(
            models=self.models,
            language=self.backend.language,
            sampling=SamplingReader(
                made_up=self.backend.made_up,
                rng=random.Random(),
                eos_token_ids=frozenset(self.backend.eos_token_ids),
                vocabulary_size=self.backend.vocabulary_size,
            ),
            max_len_tokens=self.engine.config.max_len_tokens,
            vocabulary_size=self.backend.vocabulary_size,
        )
        return Api(
            engine=self.engine,
            driver=self.driver,
            reader=reader,
            models=self.models,
            backend=self.backend,
            metrics=metrics,
            clock=time.monotonic,
            wall_clock=time.time,
            max_body_bytes=settings.max_body_bytes,
            runtime_lora=settings.allow_runtime_lora_updating,
            kv_event_sources=self._kv_event_sources,
            remote_prefill=(
                RemotePrefill(self.engine, settings.kv_transfer, sleep=asyncio.sleep)
                if settings.kv_transfer is not None
                else None
            ),
        )

    def _kv_event_sources(self) -> dict[str, dict[str, Any]]:
        """Return the settings that a subscriber needs, by data parallel rank. The result is empty if there
        are no events.
        """
        return {"0": self.kv_publisher.source()} if self.kv_publisher is not None else {}


@asynccontextmanager
async def listening(server: Server, settings: ServerSettings) -> AsyncIterator[int]:
    """Listen inside this block, which yields the port. At the block's end the server finishes the requests
    that have begun.
    """
    runner = web.AppRunner(
        server.application,
        # A compressed body is refused, because it may unpack to a thousand times its size.
        auto_decompress=False,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=settings.drain_timeout_s,
    )
    async with AsyncExitStack() as stack:
        if server.staging is not None:
            stack.push_async_callback(server.staging.close, timeout_s=settings.drain_timeout_s)
        publisher = server.kv_publisher = await _publisher(server, settings, stack)
        await runner.setup()
        try:
            await web.TCPSite(runner, settings.host, settings.port).start()
        except OSError:
            await runner.cleanup()
            raise
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(server.driver.run(), name="engine")]
            if publisher is not None:
                loops.append(tasks.create_task(publisher.serve_replays(), name="kv-event-replays"))
            try:
                yield int(runner.addresses[0][1])
            finally:
                server.driver.draining = True
                await runner.cleanup()
                for task in loops:
                    task.cancel()


async def _publisher(server: Server, settings: ServerSettings, stack: AsyncExitStack) -> KvPublisher | None:
    if server.kv_event_log is None or settings.kv_events is None:
        return None
    opened = open_publisher(server.kv_event_log, settings.kv_events, wall_clock=time.time)
    publisher = await stack.enter_async_context(opened)
    server.driver.publish_events = publisher.publish
    return publisher


async def serve(settings: ServerSettings, *, announce: Callable[[str], None]) -> None:
    """Serve until a signal comes."""
    server = Server(settings, progress=announce)
    stop = asyncio.Event()
    _on_signals(stop)
    async with listening(server, settings) as port:
        if settings.port_file is not None:
            _write_whole(settings.port_file, f"{port}\n")
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        announce(f"listening on http://{host}:{port}")
        if server.backend.about:
            announce(server.backend.about)
        if server.kv_publisher is not None:
            announce(f"KV events at {server.kv_publisher.endpoint}")
            if server.kv_publisher.replay_endpoint is not None:
                announce(f"KV event replay at {server.kv_publisher.replay_endpoint}")
        await stop.wait()
        announce(f"draining: {server.engine.num_unfinished} requests to finish")


def _staging(engine: Engine, backend: Backend, settings: KvStoreSettings | None) -> Staging | None:
    if settings is None or backend.tiers is None or backend.step_thread is None:
        return None
    return Staging(engine, backend.tiers, step_thread=backend.step_thread, staged_bytes=settings.staged_bytes)


def _backend(settings: ServerSettings, *, num_blocks: int, progress: Callable[[str], None]) -> Backend:
    if isinstance(settings.backend, CostSettings):
        return made_up(settings.backend, max_loras=settings.limits.max_loras)
    return real(
        settings.backend,
        model=settings.model,
        num_blocks=num_blocks,
        block_size_tokens=settings.block_size_tokens,
        kv_store=settings.kv_store,
        progress=progress,
    )


def _engine_config(settings: ServerSettings, backend: Backend, *, num_blocks: int) -> EngineConfig:
    return EngineConfig(
        num_blocks=num_blocks,
        block_size_tokens=settings.block_size_tokens,
        enable_prefix_caching=settings.enable_prefix_caching,
        max_model_len_tokens=_max_len(settings, backend, num_blocks=num_blocks),
        eos_token_id=backend.eos_token_ids[0] if backend.eos_token_ids else NO_TOKEN,
        more_eos_token_ids=frozenset(backend.eos_token_ids[1:]),
        prompt_cache_entries=settings.prompt_cache_entries,
        cache=settings.cache,
        limits=settings.limits,
    )


def _max_len(settings: ServerSettings, backend: Backend, *, num_blocks: int) -> int | None:
    """Return the length that was asked for, but not more than the model was made for."""
    asked, allowed = settings.max_model_len_tokens, backend.max_len_tokens
    if allowed is None:
        return asked
    if asked is not None and asked > allowed:
        raise ValueError(f"--max-model-len {asked} is more than the {allowed} positions of the model")
    return asked or min(allowed, num_blocks * settings.block_size_tokens)


def _on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def received() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGTERM)  # the next signal ends the process at once
        # A KeyboardInterrupt would be raised wherever the process happens to be, and can get lost in a
        # callback.
        loop.add_signal_handler(signal.SIGINT, os._exit, _INTERRUPTED)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received)


def _write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees the whole text, or no file."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text)
    partial.replace(path)
