"""Debian's Prometheus on a running gateway, by the chart's own ServiceMonitor and rules: every alert fires by its cause and stops after it.

Durations are shortened: ranges to `WINDOW`, each `for:` to one second, and `OTHER` besides. Most alerts fire by what happens to the
gateway here. For those in `BY_METRIC` the cause cannot be had in a test (a day of growth, an API server that is away, an unforeseen fault): their
metrics come from a second picker, which is the picker's own exporter over a state that the test sets.
"""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from aiohttp import web

from epp.telemetry.decisions import DecisionRing
from epp.telemetry.exact_status import ExactModelStatus
from epp.telemetry.metrics import Metrics
from epp.telemetry.state import EndpointStatus, PickerStatus
from epp.types import EndpointName
from tests.charts.rendering import GATEWAY, NAMESPACE, Helm, of_kind
from tests.harness.gateway import Gateway, running_gateway, write_endpoints, write_policy
from tests.harness.ports import free_port
from tests.harness.processes import wait_until
from tests.harness.prometheus import Prometheus, running_prometheus, scrape_of, shortened
from tests.harness.redis_server import RedisServer, running_redis
from tests.unit.telemetry.records import HERE, answered, decision, ended, pick
from tests.unit.telemetry.test_metrics import EXACT

pytest_plugins = ["tests.charts.fixtures", "tests.harness.fixtures"]
pytestmark = [pytest.mark.envoy, pytest.mark.cluster, pytest.mark.slow]

WINDOW: Final = "8s"
OTHER: Final = {"> 43200": "> 0", "[6h]) * 86400": "[6h])", "> 200e6": "> 1e6"}
SERVICE: Final = "gateway-prefix-gateway-metrics"
SHARED: Final = "the same beginning of every prompt " * 30
BY_METRIC: Final = {
    "PrefixGatewayMemoryGrows",
    "PrefixGatewaySourceFails",
    "PrefixGatewayClusterAway",
    "PrefixGatewayPolicyRefused",
    "PrefixGatewayNobodyWritesStatus",
    "PrefixGatewayExactModeOff",
    "PrefixGatewayTableDisagrees",
    "PrefixGatewayOverloaded",
    "PrefixGatewaySlowToBegin",
}
BY_A_FROZEN_PICKER: Final = {
    "PrefixGatewayBypassed",
    "PrefixGatewayPickerUnhealthy",
    "PrefixGatewayPickerLate",
}
WITHOUT_SERVERS: Final = {"PrefixGatewayNoEndpoints"}
BY_CUT_ANSWERS: Final = {"PrefixGatewayAnswersCut"}
BY_OTHER_PATHS: Final = {"PrefixGatewayPromptsNotSeen"}
BY_TOO_MUCH: Final = {"PrefixGatewayBreakerOverflow", "PrefixGatewayEnvoyFull"}
BY_WHAT_BREAKS: Final = {
    "PrefixGatewayErrors",
    "PrefixGatewayReloadRefused",
    "PrefixGatewayFilesRunOut",
    "PrefixGatewaySharingAway",
    "PrefixGatewayBlindOnLoad",
    "PrefixGatewayServerLeftOut",
    "PrefixGatewayAnswersFail",
    "PrefixGatewayFirstChoiceFails",
}
AFTER_A_FAULT: Final = {"epp_sharing_errors_total", "epp_refused_total"}
"""Counted by reason, so that they have no series before the first."""
_MAX_CONNECTIONS: Final = 150
_ROUND_ROBIN: Final = {"rule": "round-robin", "sampling": {"share": 1.0}, "chunks": {"sizeBytes": 64}}


class SecondPicker:
    """The picker's exporter over a state that the test sets."""

    def __init__(self) -> None:
        servers = [
            EndpointStatus(name=EndpointName(f"t{n}"), address=HERE, ready=True, scrape_age_s=0.5)
            for n in range(4)
        ]
        self.status = self.healthy = PickerStatus(policy="p", rule="r", endpoints=tuple(servers), exact=EXACT)
        self.metrics = Metrics(decisions=DecisionRing(keep=1), state=lambda: self.status)
        # The process's own figures are this test's: those that the alert reads are made up.
        self.memory = 1e8
        self._grows = False
        self._fails = False
        self.set_faulty(False)

    def set_faulty(self, faulty: bool) -> None:  # noqa: FBT001
        self._grows = self._fails = faulty
        self.metrics.followed("pods", not faulty)
        self.metrics.judged(1, int(faulty))
        self.metrics.lease_held(not faulty)
        off = {"m": ExactModelStatus(state="off", reason="", prompts={})}
        self.status = (
            replace(self.healthy, overload_ratio=0.5, exact=replace(EXACT, models=off))
            if faulty
            else replace(self.healthy, source_failures=self.status.source_failures)
        )

    def page(self) -> bytes:
        """One scrape later."""
        failed = self.status.source_failures.get("scrape", 0) + self._fails
        self.status = replace(self.status, source_failures={"scrape": failed})
        self.memory += 2e7 * self._grows
        told = decision(matched_tokens=600_000)
        told.cached_tokens = 60_000 if self._fails else 600_000
        made = pick(told)
        self.metrics.picked(made, seconds=0.001)
        self.metrics.hear(ended(made))
        for server in self.status.endpoints:
            told = decision()
            told.served_by, told.status = server.name, 200
            told.headers_s = 3.0 if self._fails and server.name == "t3" else 0.1
            self.metrics.hear(answered(pick(told)))
        lines = [
            line
            for line in self.metrics.page().splitlines()
            if not line.startswith((b"process_resident_memory_bytes ", b"epp_reload_ok"))
        ]
        return b"\n".join([*lines, b"process_resident_memory_bytes %f" % self.memory, b""])


@asynccontextmanager
async def serving(picker: SecondPicker) -> AsyncIterator[str]:
    """Its metrics page's address."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=picker.page(), content_type="text/plain")

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def traffic(gateway: Gateway) -> AsyncIterator[None]:
    """A few requests at any time; most share a prefix. What comes of them does not matter."""

    async def client(n: int) -> None:
        for turn in range(1_000_000):
            try:
                async with gateway.client.stream(f"{SHARED} {n} {turn % 3}") as reply:
                    await reply.rest()
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client(n)) for n in range(6)]
        yield
        for task in tasks:
            task.cancel()


class Site:
    """The gateway, its Redis, the second picker and Prometheus over them."""

    def __init__(
        self, gateway: Gateway, redis: RedisServer, second: SecondPicker, prometheus: Prometheus
    ) -> None:
        self.gateway = gateway
        self.redis = redis
        self.second = second
        self.prometheus = prometheus


@asynccontextmanager
async def running_site(directory: Path, helm: Helm) -> AsyncIterator[Site]:
    values = {"monitoring": {"serviceMonitor": {"enabled": True}, "rules": {"enabled": True}}}
    objects = helm.render(GATEWAY, values)
    monitor = of_kind(objects, "ServiceMonitor")
    groups = of_kind(objects, "PrometheusRule")["spec"]["groups"]
    second, status = SecondPicker(), f"127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(running_redis(directory))
        gateway = await stack.enter_async_context(
            running_gateway(
                directory,
                backends=4,
                policy=_ROUND_ROBIN,
                edit=narrow_breaker,
                envoy={"status": status, "maxConnections": _MAX_CONNECTIONS},
                sharing={"pool": "p", "redis": {"url": redis.url}},
                admin={"address": f"127.0.0.1:{free_port()}"},
            )
        )
        page = await stack.enter_async_context(serving(second))
        targets = {
            "metrics": {"pod-a": gateway.config.admin.address, "pod-b": page},
            "envoy-metrics": {"pod-a": status},
        }
        scrapes = scrape_of(monitor, targets, namespace=NAMESPACE, service=SERVICE)
        prometheus = await stack.enter_async_context(
            running_prometheus(directory, scrapes=scrapes, rules=shortened(groups, OTHER, window=WINDOW))
        )
        yield Site(gateway, redis, second, prometheus)


def narrow_breaker(document: dict[str, Any]) -> None:
    """Twenty requests at once in place of 100,000: a test cannot have so many."""
    for cluster in document["static_resources"]["clusters"]:
        if cluster["name"] == "model-servers":
            cluster["circuit_breakers"]["thresholds"][0]["max_requests"] = 20


@contextmanager
def few_files_left(pid: int) -> Iterator[None]:
    """The picker's limit is where it already is."""
    usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    open_now = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_now + 3, usual[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)


@asynccontextmanager
async def too_many_connections(gateway: Gateway) -> AsyncIterator[None]:
    host, port = gateway.config.envoy.listen.split(":")
    open_ones = [await asyncio.open_connection(host, int(port)) for _ in range(_MAX_CONNECTIONS + 40)]
    try:
        yield
    finally:
        for _, writer in open_ones:
            writer.close()


@asynccontextmanager
async def too_many_requests(gateway: Gateway) -> AsyncIterator[None]:
    """So many at once that the narrow breaker turns some away, and fewer than the connections that Envoy takes."""

    async def one() -> None:
        try:
            async with gateway.client.stream("x") as reply:
                await reply.rest()
        except aiohttp.ClientError:
            pass

    gates = [backend.behaviour.before_body for backend in gateway.backends]
    for gate in gates:
        gate.shut()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(100):
                group.create_task(one())
            yield
            for gate in gates:
                gate.open()
    finally:
        for gate in gates:
            gate.open()


async def test_every_alert_fires_by_its_cause_and_stops_after_it_and_every_panel_has_data(
    tmp_path: Path, helm: Helm
) -> None:
    async with running_site(tmp_path, helm) as site, traffic(site.gateway):
        await have_data(site.prometheus, [each for each in asked_by_panels() if not after_a_fault(each)])
        await site.prometheus.wait_quiet()
        by_endpoint = await site.prometheus.query('sum by (endpoint) (epp_endpoint_ready{pod="pod-a"})')
        assert {each["metric"]["endpoint"] for each in by_endpoint} == {"s0", "s1", "s2", "s3"}, (
            "the label says which model server, not which port Prometheus asked"
        )
        fired = await the_picker_freezes(site)
        fired |= await too_much_comes(site)
        fired |= await other_paths_are_asked_for(site)
        fired |= await much_breaks(site)
        fired |= await no_server_is_left(site)
    names = {rule["alert"] for rule in rules_of(helm)}
    wanted = BY_METRIC.union(
        BY_A_FROZEN_PICKER, BY_TOO_MUCH, BY_CUT_ANSWERS, BY_OTHER_PATHS, BY_WHAT_BREAKS, WITHOUT_SERVERS
    )
    assert wanted == names, "an alert of the chart that this test does not know"
    assert wanted <= fired


def rules_of(helm: Helm) -> list[dict[str, Any]]:
    objects = helm.render(GATEWAY, {"monitoring": {"rules": {"enabled": True}}})
    rules: list[dict[str, Any]] = of_kind(objects, "PrometheusRule")["spec"]["groups"][0]["rules"]
    return rules


async def the_picker_freezes(site: Site) -> set[str]:
    picker = site.gateway.picker.process
    picker.freeze()
    fired = await site.prometheus.wait_firing(BY_A_FROZEN_PICKER - {"PrefixGatewayPickerLate"})
    picker.thaw()
    await wait_until(site.gateway.picker.ready, what="the picker answers again")

    async def stutter() -> None:
        while True:
            picker.freeze()
            await asyncio.sleep(0.4)
            picker.thaw()
            await asyncio.sleep(0.6)

    stuttering = asyncio.create_task(stutter())
    try:
        fired |= await site.prometheus.wait_firing({"PrefixGatewayPickerLate"})
    finally:
        stuttering.cancel()
        picker.thaw()
    await site.prometheus.wait_quiet()
    return fired


async def too_much_comes(site: Site) -> set[str]:
    async with too_many_requests(site.gateway), too_many_connections(site.gateway):
        fired = await site.prometheus.wait_firing(BY_TOO_MUCH)
        dies = site.gateway.backends[2]
        await dies.stop()  # under the answers that it has begun
        fired |= await site.prometheus.wait_firing(BY_CUT_ANSWERS)
        await dies.start()
    await site.prometheus.wait_quiet()
    return fired


async def other_paths_are_asked_for(site: Site) -> set[str]:
    """Most requests have no prompt."""

    async def ask() -> None:
        while True:
            await site.gateway.client.get("/v1/models")
            await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask()) for _ in range(24)]
        fired = await site.prometheus.wait_firing(BY_OTHER_PATHS)
        for task in tasks:
            task.cancel()
    await site.prometheus.wait_quiet()
    return fired


async def much_breaks(site: Site) -> set[str]:
    gateway = site.gateway
    steady, sick, gone, silent = gateway.backends
    looks = count()

    def now_and_then() -> None:
        """The one that is well otherwise fails too: with 503, which Envoy retries elsewhere, and at times with what the client sees."""
        look = next(looks)
        if look % 5 == 0:
            steady.behaviour.fail_status = 500 if look % 15 == 0 else 503
            steady.behaviour.fail_next = 1

    sick.behaviour.fail_next, sick.behaviour.fail_status = 10**9, 500
    silent.metrics_page = "error"
    await gone.stop()
    policy = Path(gateway.config.policy_file)
    policy.write_text("spec: {rule: no-such-rule}\n")
    site.second.set_faulty(True)
    site.redis.process.freeze()
    with few_files_left(gateway.picker.process.pid):
        fired = await site.prometheus.wait_firing(BY_WHAT_BREAKS | BY_METRIC, while_=now_and_then)
    site.redis.process.thaw()
    site.second.set_faulty(False)
    write_policy(gateway.config, _ROUND_ROBIN)
    await gone.start()
    silent.metrics_page = "normal"
    for backend in gateway.backends:
        backend.behaviour.fail_next = 0
    await site.prometheus.wait_quiet()
    return fired


async def no_server_is_left(site: Site) -> set[str]:
    write_endpoints(site.gateway.config, [])
    fired = await site.prometheus.wait_firing(WITHOUT_SERVERS)
    await have_data(site.prometheus, [each for each in asked_by_panels() if after_a_fault(each)])
    write_endpoints(site.gateway.config, site.gateway.backends)
    await site.prometheus.wait_quiet()
    return fired


def asked_by_panels() -> list[str]:
    """Every query of the dashboard that has an answer while nothing restarts."""
    dashboard = json.loads((GATEWAY / "files" / "dashboard.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def after_a_fault(expression: str) -> bool:
    return any(name in expression for name in AFTER_A_FAULT)


async def have_data(prometheus: Prometheus, expressions: list[str]) -> None:
    """Each of them, as Grafana would send it."""
    empty: list[str] = []

    async def all_answer() -> bool:
        empty[:] = [each for each in expressions if not await prometheus.query(as_grafana_asks(each))]
        return not empty

    try:
        await wait_until(all_answer, what="every query returns data", timeout_s=60)
    except AssertionError as error:
        raise AssertionError("\n".join(["no data:", *empty])) from error


def as_grafana_asks(expression: str) -> str:
    variables: Mapping[str, str] = {
        "$__rate_interval": WINDOW,
        "$namespace": NAMESPACE,
        "$service": SERVICE,
    }
    for name, value in variables.items():
        expression = expression.replace(name, value)
    return expression
