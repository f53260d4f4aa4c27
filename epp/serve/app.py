"""Builds every part of a worker from the configuration, connects the parts, and runs until stopped.

This is the composition root: besides the command line, no other module knows all parts. Every loop is a named
task that `sources` keeps running. Only a failure of the serving socket ends the process.
"""

import asyncio
import contextlib
import logging
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from epp.base.errors import usable
from epp.base.types import Endpoint
from epp.config.policy import DEFAULT_POLICY, Policy
from epp.config.sections import Kubernetes, consecutive
from epp.config.settings import Config
from epp.observe.misses import Misses
from epp.observe.recording import Tap
from epp.observe.telemetry.admin import AdminServer
from epp.observe.telemetry.board import Board
from epp.observe.telemetry.decisions import DecisionRing
from epp.observe.telemetry.logs import setup_logging
from epp.observe.telemetry.metrics import Metrics
from epp.observe.telemetry.picker_state import PickerStatus
from epp.observe.tracing import start as tracing
from epp.picker.gate import Gate
from epp.picker.picker import Picker
from epp.protocol.http_events import BodyRoom
from epp.serve import inputs
from epp.serve.envoy import files
from epp.serve.state_report import dry_run_of, endpoints_of
from epp.serve.upkeep import Upkeep
from epp.sources.files.endpoints_file import Listed
from epp.sources.keep import Sources
from epp.sources.kube.cluster import Cluster
from epp.sources.scraping.model_lists import ModelLists
from epp.sources.scraping.page_client import ApiKey
from epp.sources.scraping.probes import Probes
from epp.sources.scraping.scraper import Scraper
from epp.sources.sharing import service as sharing
from epp.transport.server import ExtProcServer

_log = logging.getLogger("epp")

_STOP_GRACE_S = 1.0
_KEPT_DECISIONS = 1000
_READY_LOOK_S = 0.05


class App:
    """One worker process with all its parts. `run` returns the exit status of the process."""

    def __init__(self, config: Config, *, worker: int = 0, hub: Path | None = None) -> None:
        self._config = config
        self._worker = worker
        self._log_counts = setup_logging(config.log).counts
        self._inputs = inputs.load_inputs(config, tolerant=True)
        self._draining = False
        self._watchers: Sequence[inputs.Watcher] = ()
        self._endpoints_known = False
        self._rng = rng = random.Random()
        self._sources = sources = Sources(rng=rng)
        unix_offset_s = time.time() - time.monotonic()
        self._unix_clock = lambda: time.monotonic() + unix_offset_s
        self._picker = Picker(
            DEFAULT_POLICY,
            rng=rng,
            unix_offset_s=unix_offset_s,
            secret=inputs.hash_secret(config, hub=hub),
            refuses_unknown_models=config.models.unknown == "NotFound",
        )
        self._use_policy(self._inputs.policy)
        self._gate = Gate(self._picker)
        self._sharing = sharing.make(self._picker, config.sharing, hub=hub, keep=sources.keep)
        make_exact = self._inputs.make_exact_service
        self._exact = make_exact(self._picker) if make_exact is not None else None
        self._make_sources()
        self._eds_file = Path(config.envoy.eds_file) if config.envoy.eds_file and worker == 0 else None
        self._misses = Misses(self._picker)
        self._picker.subscribe(self._misses.on_event)
        self._decisions = DecisionRing(maxlen=_KEPT_DECISIONS)
        self._metrics = Metrics(decisions=self._decisions, state=self._status, unix_clock=self._unix_clock)
        self._picker.subscribe(self._metrics.on_event)
        self._tracer = tracing.make(worker=worker) if tracing.on(config.tracing) else None
        if self._tracer is not None:
            self._picker.subscribe(self._tracer.on_event)
        self._refused_policies: Sequence[str] = ()
        """Why policies of the cluster are not accepted."""
        self._make_servers()
        self._upkeep = Upkeep(self._picker, self._metrics, overload=self._overload)
        self._cluster = self._follow_cluster(config.kubernetes) if config.kubernetes is not None else None
        self._write_for_envoy()

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT, then drain."""
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, stopping.set)
        async with contextlib.AsyncExitStack() as stack:
            await self._start(stack)
            tasks = self._tasks()
            await stopping.wait()
            self._draining = True
            drain_s = self._config.drain_seconds
            _log.info("draining %d streams, for %g s at most", len(self._server.streams.live), drain_s)
            await self._server.drain(drain_s)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return 0

    # -- parts, made at start --------------------------------------------------------------------------------

    def _make_sources(self) -> None:
        """Make the parts that ask the model servers."""
        fleet, key = self._picker.fleet, ApiKey(self._config.models.api_key_file)
        self._scraper = Scraper(
            settings=lambda: self._picker.policy.spec.scrape,
            on_metrics=lambda name, metrics: self._picker.news.observe(name, metrics, now=time.monotonic()),
            in_use=fleet.in_use,
            clock=time.monotonic,
            keep=self._sources.keep,
            rng=self._rng,
        )
        self._model_lists = ModelLists(
            settings=self._config.models,
            key=key,
            on_lists=lambda lists: self._picker.news.take_lists(lists, now=time.monotonic()),
            unknown_asked=lambda: fleet.served.unknown_asked,
            clock=time.monotonic,
            rng=self._rng,
        )
        self._probes = Probes(
            due=lambda: fleet.failures.probes_due(now=time.monotonic()),
            on_verdict=lambda probe, verdict: fleet.failures.probed(probe, verdict, now=time.monotonic()),
            key=key,
        )

    def _make_servers(self) -> None:
        """Make the servers of the admin pages and of Envoy's calls."""
        config = self._config
        self._board = Board(
            state=self._status,
            decisions=self._decisions,
            explain=self._misses.account,
            dry_run=lambda: dry_run_of(self._picker),
            problems=self._problems,
            unix_clock=self._unix_clock,
        )
        self._admin = AdminServer(
            address=consecutive(config.admin.address, config.workers)[self._worker],
            metrics=self._metrics,
            board=self._board,
            not_ready=self._not_ready,
            recording=Tap(self._picker).read,
            hosts=config.admin.hosts,
            policy=lambda: self._picker.policy,
        )
        self._room = BodyRoom(config.streams.max_held_body_bytes)
        address = config.listen.addresses(workers=config.workers)[self._worker]
        self._listen = msgspec.structs.replace(config.listen, address=address)
        self._server = ExtProcServer(
            self._picker,
            listen=self._listen,
            gate=self._gate,
            settings=inputs.stream_settings(config, self._room, traced=self._tracer is not None),
        )

    def _write_for_envoy(self) -> None:
        """Write the files that Envoy reads, and add the endpoints if a file lists them. Raises ConfigError if
        a file cannot be written.
        """
        with usable(f"envoy.edsFile: {self._config.envoy.eds_file}"):
            if self._eds_file is not None:
                files.write_first(self._config)
            if self._cluster is None:
                self._on_endpoints_file(self._inputs.listed)

    # -- while it runs ---------------------------------------------------------------------------------------

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        """Start the servers, which end with the stack."""
        with usable("admin.address", advice="is another picker running?"):
            address = await self._admin.start()
        stack.push_async_callback(self._admin.stop)
        _log.info("admin pages on http://%s/", address)
        if self._tracer is not None:
            _log.info("spans of sampled picks go to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names")
            stack.push_async_callback(tracing.stop, self._tracer.processor)
        await self._server.start(ready=not self._not_ready())
        stack.push_async_callback(self._server.stop, _STOP_GRACE_S)
        _log.info("serving on %s, worker %d", self._listen.address, self._worker)

    def _tasks(self) -> list[asyncio.Task[None]]:
        """Return every loop that runs as long as the process."""
        config = self._config
        tasks: list[asyncio.Task[None]] = []

        def keep(source: str, run: Callable[[], Awaitable[None]], *, name: str = "") -> None:
            tasks.append(asyncio.create_task(self._sources.keep(source, run), name=name or source))

        keep("scrape", self._scraper.run)
        keep("models", self._model_lists.run)
        keep("probes", self._probes.run)
        keep("housekeeping", self._upkeep.housekeep)
        keep("housekeeping", self._upkeep.watch_lag, name="watch of the event loop")
        if self._cluster is not None:
            keep("kubernetes", self._cluster.run, name="cluster")
        on_policy = self._use_policy if self._cluster is None else self._cluster.set_default
        self._watchers = inputs.watchers(
            config,
            self._inputs,
            self._metrics,
            on_endpoints=self._on_endpoints_file,
            on_policy=on_policy,
        )
        for watcher in self._watchers:
            keep("file", watcher.run, name=f"watcher of {watcher.path}")
        if self._sharing is not None:
            keep("sharing", self._sharing.run)
        if self._exact is not None:
            keep("exact", self._exact.run, name="exact mode")
        keep("explain", self._misses.run)
        keep("page", self._board.run)
        if self._not_ready():
            keep("readiness", self._become_ready)
        return tasks

    def _not_ready(self) -> str:
        """Return the reason why no requests should come here. The text is empty if requests may come. A lack
        of endpoints is not a reason, because clients then get a clear 503.
        """
        if self._draining:
            return "draining"
        if not self._endpoints_known:
            return "waiting for the API server to list the pods"
        if self._cluster is not None and not self._model_lists.asked_all:
            return "waiting for the model servers to list their models"
        if self._sharing is not None and not self._sharing.warm:
            return "waiting for the table of the other pickers"
        return ""

    def _problems(self) -> list[str]:
        """Return what keeps this picker from working as its files and objects say."""
        unseen = [what for what, followed in self._metrics.process.followed.items() if not followed]
        return [
            *(watcher.fault for watcher in self._watchers if watcher.fault),
            *(
                f"The API server does not show the {what}: the last known state stays in use."
                for what in unseen
            ),
            *self._refused_policies,
            *self._sources.failing(now=asyncio.get_running_loop().time()),
        ]

    def _overload(self) -> float:
        return self._server.streams.overload.share(now=time.monotonic())

    def _status(self) -> PickerStatus:
        now, picker, policy = time.monotonic(), self._picker, self._picker.policy
        name, rule = policy.metadata.name, policy.spec.rule
        return PickerStatus(
            endpoints=endpoints_of(picker, self._scraper.targets, now=now),
            table_entries=picker.caches.table.entries,
            policy=name,
            rule=rule,
            policy_info={(name, rule): 1},
            without_model_list=len(picker.fleet.served.unlisted),
            goal_s=policy.spec.flow.goal_seconds,
            sharing=self._sharing.status if self._sharing is not None else None,
            exact=self._exact.status if self._exact is not None else None,
            draining=self._draining,
            held_body_bytes=self._room.held_bytes,
            overload_ratio=self._overload(),
            flow=tuple(self._gate.status(now=now)),
            unserved=tuple(self._gate.unserved()),
            source_failures=dict(self._sources.failures),
            probes=dict(self._probes.counts),
            log_lines_left_out=dict(self._log_counts),
        )

    async def _become_ready(self) -> None:
        """Report the picker as ready once nothing is missing."""
        while self._not_ready():  # noqa: ASYNC110 - several parts decide, and none tells when
            await asyncio.sleep(_READY_LOOK_S)
        self._server.health.set_ready(ready=True)
        await asyncio.get_running_loop().create_future()  # waits until the task is cancelled

    def _follow_cluster(self, settings: Kubernetes) -> Cluster:
        return Cluster(
            settings=settings,
            default=self._inputs.policy,
            writes=self._worker == 0,  # all workers of one pod see the same, so only one of them writes it
            keep=self._sources.keep,
            rng=self._rng,
            on_endpoints=self._set_endpoints,
            on_policies=self._use_policies,
            on_objectives=self._gate.set_objectives,
            on_rewrites=self._picker.news.set_rewrites,
            on_judged=self._judged,
            on_state=self._metrics.process.followed.__setitem__,
            served=self._picker.fleet.served.listed_names,
        )

    def _judged(self, accepted: int, faults: Sequence[str]) -> None:
        self._refused_policies = faults
        self._metrics.process.policies.update(accepted=accepted, refused=len(faults))

    def _use_policies(self, acting: Policy, tried: Policy | None) -> None:
        if acting != self._picker.policy:
            self._picker.set_policy(acting)
            for remark in acting.spec.failures.former_names():
                _log.warning("policy %s: %s", acting.metadata.name, remark)
            _log.info("policy %s, generation %d, routes", acting.metadata.name, acting.metadata.generation)
        current = self._picker.dry_run
        if tried != (current.policy if current is not None else None):
            self._picker.set_dry_run(tried)
            _log.info("policy %s is scored in dry run", tried.metadata.name if tried else "none")

    def _use_policy(self, policy: Policy) -> None:
        """Use the policy of the file. If that policy is in dry run, the policy in use stays."""
        tried = policy.spec.mode == "DryRun"
        self._use_policies(self._picker.policy if tried else policy, policy if tried else None)

    def _on_endpoints_file(self, listed: Listed) -> None:
        self._picker.news.set_rewrites(listed.rewrites)
        self._set_endpoints(listed.endpoints)

    def _set_endpoints(
        self,
        endpoints: Sequence[Endpoint],
        pools: frozenset[str] = frozenset(),
        starting: frozenset[str] = frozenset(),
    ) -> None:
        """Use a new list of endpoints. Envoy's file is written first, so that Envoy knows of an endpoint
        before, or soon after, the picker names the endpoint. Raises OSError if the file cannot be written, as
        on a full disk: the source of the list tries again.
        """
        if self._eds_file is not None:
            files.write_if_changed(self._eds_file, files.render_endpoints(endpoints))
        self._picker.starting = starting
        self._picker.news.set_endpoints(endpoints, pools=pools, now=time.monotonic())
        self._scraper.set_endpoints(endpoints)
        self._model_lists.set_endpoints(endpoints)
        if self._exact is not None:
            self._exact.set_endpoints(endpoints)
        self._endpoints_known = True
