"""Debian's Prometheus watches a running gateway by the chart's own ServiceMonitor and rules. Every alert
fires when its cause is there and stops afterwards.

Times are shortened: ranges to `WINDOW`, each `for:` to one second, and those in `OTHER`. Each cause is real:
something happens to the gateway, or to a second picker, which follows a real API server.
"""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from itertools import count
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from tests.charts.rendering import GATEWAY, NAMESPACE, Helm, of_kind
from tests.cluster_env.control_plane import ControlPlane
from tests.harness.gateway import Gateway, running_gateway, write_endpoints, write_policy
from tests.harness.picker_in_cluster import PickerInCluster, running_picker_in_cluster
from tests.harness.ports import free_port
from tests.harness.processes import ManagedProcess, wait_until
from tests.harness.prometheus import Prometheus, running_prometheus, scrape_of, shortened
from tests.harness.redis_server import RedisServer, running_redis

pytest_plugins = ["tests.charts.fixtures", "tests.harness.fixtures"]
pytestmark = [pytest.mark.envoy, pytest.mark.cluster, pytest.mark.slow]

WINDOW: Final = "8s"
OTHER: Final = {"> 43200": "> 0", "[6h]) * 86400": "[6h])", "> 200e6": "> 1e6"}
SERVICE: Final = "gateway-prefix-gateway-metrics"
SHARED: Final = "the same beginning of every prompt " * 30
BY_A_FROZEN_PICKER: Final = {"PrefixGatewayBypassed", "PrefixGatewayPickerUnhealthy"}
BY_LATE_TURNS: Final = {"PrefixGatewayPickerLate"}
WITH_TOO_LITTLE_CPU: Final = {"PrefixGatewayOverloaded"}
WITHOUT_SERVERS: Final = {"PrefixGatewayNoEndpoints"}
WITHOUT_A_WAY_IN: Final = {"PrefixGatewaySourceFails"}
WITH_THE_WAY_CUT: Final = {"PrefixGatewayClusterAway"}
BY_A_WRONG_CLUSTER: Final = {
    "PrefixGatewayPolicyRefused",
    "PrefixGatewayExactModeOff",
}
BY_LARGE_PROMPTS: Final = {"PrefixGatewayMemoryGrows"}
WITHOUT_CACHES: Final = {"PrefixGatewayTableDisagrees"}
BY_A_SLOW_SERVER: Final = {"PrefixGatewaySlowToBegin"}
BY_CUT_ANSWERS: Final = {"PrefixGatewayAnswersCut", "PrefixGatewayServerCutsAnswers"}
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
"""Counters by reason. They have no series before the first event."""
_MAX_CONNECTIONS: Final = 150
_ROUND_ROBIN: Final = {"rule": "round-robin", "sampling": {"share": 1.0}, "chunks": {"sizeBytes": 64}}


@asynccontextmanager
async def clients(number: int, ask: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Run clients that send requests again and again. Their answers do not matter."""

    async def one() -> None:
        while True:
            with suppress(aiohttp.ClientError):
                await ask()
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one()) for _ in range(number)]
        yield
        for task in tasks:
            task.cancel()


def traffic(gateway: Gateway) -> AbstractAsyncContextManager[None]:
    """Send a few requests all the time. They share a prefix."""
    numbers = count()

    async def ask() -> None:
        async with gateway.client.stream(f"{SHARED} {next(numbers) % 18}") as reply:
            await reply.rest()

    return clients(6, ask)


class WatchedCluster:
    """The gateway, its Redis, the picker in a cluster, and the Prometheus that watches them."""

    def __init__(
        self, gateway: Gateway, redis: RedisServer, second: PickerInCluster, prometheus: Prometheus
    ) -> None:
        self.gateway = gateway
        self.redis = redis
        self.second = second
        self.prometheus = prometheus


@asynccontextmanager
async def running_site(
    directory: Path, helm: Helm, cluster: ControlPlane, namespace: str
) -> AsyncIterator[WatchedCluster]:
    values = {"monitoring": {"serviceMonitor": {"enabled": True}, "rules": {"enabled": True}}}
    objects = helm.render(GATEWAY, values)
    monitor = of_kind(objects, "ServiceMonitor")
    groups = of_kind(objects, "PrometheusRule")["spec"]["groups"]
    status, folder = f"127.0.0.1:{free_port()}", directory / "in-cluster"
    folder.mkdir()
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
        second = await stack.enter_async_context(running_picker_in_cluster(cluster, namespace, folder))
        targets = {
            "metrics": {"pod-a": gateway.config.admin.address, "pod-b": second.address},
            "envoy-metrics": {"pod-a": status},
        }
        scrapes = scrape_of(monitor, targets, namespace=NAMESPACE, service=SERVICE)
        prometheus = await stack.enter_async_context(
            running_prometheus(directory, scrapes=scrapes, rules=shortened(groups, OTHER, window=WINDOW))
        )
        yield WatchedCluster(gateway, redis, second, prometheus)


def narrow_breaker(document: dict[str, Any]) -> None:
    """Limit Envoy to twenty requests at once in place of 100,000. A test cannot send that many."""
    for cluster in document["static_resources"]["clusters"]:
        if cluster["name"] == "model-servers":
            cluster["circuit_breakers"]["thresholds"][0]["max_requests"] = 20


@contextmanager
def few_files_left(pid: int) -> Iterator[None]:
    """Lower the picker's limit of open files to the number that it has open."""
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
    """Send so many requests at once that the lowered limit refuses some of them, but fewer than Envoy's
    limit of connections.
    """

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


async def test_every_alert_fires_by_its_cause_and_every_panel_has_data(
    tmp_path: Path, helm: Helm, cluster: ControlPlane, namespace: str
) -> None:
    async with running_site(tmp_path, helm, cluster, namespace) as site, traffic(site.gateway):
        fired = await one_picker_has_no_way_in_and_one_server_is_slow(site)
        await have_data(site.prometheus, [each for each in asked_by_panels() if not after_a_fault(each)])
        await site.prometheus.wait_quiet()
        by_endpoint = await site.prometheus.query('sum by (endpoint) (epp_endpoint_ready{pod="pod-a"})')
        assert {each["metric"]["endpoint"] for each in by_endpoint} == {"s0", "s1", "s2", "s3"}, (
            "the label says which model server, not which port Prometheus asked"
        )
        fired |= await the_picker_freezes(site)
        fired |= await too_much_comes(site)
        fired |= await prompts_and_caches_are_missing(site)
        fired |= await much_breaks(site)
        fired |= await no_server_is_left(site)
    names = {rule["alert"] for rule in rules_of(helm)}
    wanted = BY_WHAT_BREAKS.union(
        BY_A_FROZEN_PICKER,
        BY_LATE_TURNS,
        WITH_TOO_LITTLE_CPU,
        BY_LARGE_PROMPTS,
        BY_TOO_MUCH,
        BY_CUT_ANSWERS,
        BY_OTHER_PATHS,
        BY_A_SLOW_SERVER,
        WITHOUT_CACHES,
        BY_A_WRONG_CLUSTER,
        WITHOUT_SERVERS,
        WITHOUT_A_WAY_IN,
        WITH_THE_WAY_CUT,
    )
    assert wanted == names, "an alert of the chart that this test does not know"
    assert wanted <= fired


def rules_of(helm: Helm) -> list[dict[str, Any]]:
    objects = helm.render(GATEWAY, {"monitoring": {"rules": {"enabled": True}}})
    rules: list[dict[str, Any]] = of_kind(objects, "PrometheusRule")["spec"]["groups"][0]["rules"]
    return rules


async def one_picker_has_no_way_in_and_one_server_is_slow(site: WatchedCluster) -> set[str]:
    """The picker that follows the API server lacks the file with its certificate. So its source fails and is
    started again.
    """
    slow = site.gateway.backends[3].behaviour
    slow.headers_pause_s = 2.0
    fired = await site.prometheus.wait_firing(WITHOUT_A_WAY_IN | BY_A_SLOW_SERVER)
    slow.headers_pause_s = 0.0
    await site.second.let_in()
    return fired


async def the_picker_freezes(site: WatchedCluster) -> set[str]:
    picker = site.gateway.picker.process
    picker.freeze()
    fired = await site.prometheus.wait_firing(BY_A_FROZEN_PICKER)
    picker.thaw()
    await wait_until(site.gateway.picker.ready, what="the picker answers again")

    async with stuttering(picker, frozen_s=0.4, running_s=0.6), clients(8, large_prompts(site.gateway)):
        fired |= await site.prometheus.wait_firing(BY_LATE_TURNS | BY_LARGE_PROMPTS)
    async with stuttering(picker, frozen_s=0.09, running_s=0.01), clients(100, small_prompts(site.gateway)):
        fired |= await site.prometheus.wait_firing(WITH_TOO_LITTLE_CPU)
    await site.prometheus.wait_quiet()
    return fired


@asynccontextmanager
async def stuttering(picker: ManagedProcess, *, frozen_s: float, running_s: float) -> AsyncIterator[None]:
    """Stop the process for a part of each period, as happens to a pod at its CPU limit."""

    async def stutter() -> None:
        while True:
            picker.freeze()
            await asyncio.sleep(frozen_s)
            picker.thaw()
            await asyncio.sleep(running_s)

    task = asyncio.create_task(stutter())
    try:
        yield
    finally:
        task.cancel()
        picker.thaw()


def small_prompts(gateway: Gateway) -> Callable[[], Awaitable[object]]:
    return lambda: gateway.client.complete("a few words")


def large_prompts(gateway: Gateway) -> Callable[[], Awaitable[object]]:
    """Send prompts of half a megabyte. Each is different, so the picker has to remember more and more."""
    numbers = count()

    def ask() -> Awaitable[object]:
        return gateway.client.complete(f"{next(numbers)} of many different words " * 16_000)

    return ask


async def too_much_comes(site: WatchedCluster) -> set[str]:
    async with too_many_requests(site.gateway), too_many_connections(site.gateway):
        fired = await site.prometheus.wait_firing(BY_TOO_MUCH)
        dies = site.gateway.backends[2]
        await dies.stop()  # while its answers run
        fired |= await site.prometheus.wait_firing(BY_CUT_ANSWERS)
        await dies.start()
    await site.prometheus.wait_quiet()
    return fired


async def prompts_and_caches_are_missing(site: WatchedCluster) -> set[str]:
    """Most requests have no prompt, and no server keeps its computed blocks."""
    gateway = site.gateway
    for backend in gateway.backends:
        backend.behaviour.cached_share = 0.0
    same = "the same long document every time " * 6_000
    async with clients(2, lambda: gateway.client.complete(same)):
        async with clients(24, lambda: gateway.client.get("/v1/batches")):
            fired = await site.prometheus.wait_firing(BY_OTHER_PATHS | WITHOUT_CACHES)
        for backend in gateway.backends:
            backend.behaviour.cached_share = 1.0
        await site.prometheus.wait_quiet()
    return fired


async def much_breaks(site: WatchedCluster) -> set[str]:
    gateway = site.gateway
    steady, sick, gone, silent = gateway.backends
    looks = count()

    def now_and_then() -> None:
        """The server that is otherwise well fails too. It answers 503, which Envoy retries at another server,
        and sometimes a status that reaches the client.
        """
        look = next(looks)
        if look % 5 == 0:
            steady.behaviour.fail_status = 500 if look % 15 == 0 else 503
            steady.behaviour.fail_next = 1

    sick.behaviour.fail_next, sick.behaviour.fail_status = 10**9, 500
    silent.metrics_page = "error"
    await gone.stop()
    policy = Path(gateway.config.policy_file)
    policy.write_text("spec: {rule: no-such-rule}\n")
    # The policy is refused, and the block names have another seed.
    await site.second.break_much()
    site.redis.process.freeze()
    with few_files_left(gateway.picker.process.pid):
        fired = await site.prometheus.wait_firing(BY_WHAT_BREAKS | BY_A_WRONG_CLUSTER, while_=now_and_then)
    site.redis.process.thaw()
    await site.second.repair()
    write_policy(gateway.config, _ROUND_ROBIN)
    await gone.start()
    silent.metrics_page = "normal"
    for backend in gateway.backends:
        backend.behaviour.fail_next = 0
    await site.prometheus.wait_quiet()
    return fired


async def no_server_is_left(site: WatchedCluster) -> set[str]:
    write_endpoints(site.gateway.config, [])
    await site.second.relay.cut()
    fired = await site.prometheus.wait_firing(WITHOUT_SERVERS | WITH_THE_WAY_CUT)
    await have_data(site.prometheus, [each for each in asked_by_panels() if after_a_fault(each)])
    write_endpoints(site.gateway.config, site.gateway.backends)
    await site.second.relay.mend()
    await site.prometheus.wait_quiet()
    return fired


def asked_by_panels() -> list[str]:
    """Return every query of the dashboard that has an answer while nothing restarts."""
    dashboard = json.loads((GATEWAY / "files" / "dashboard.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def after_a_fault(expression: str) -> bool:
    return any(name in expression for name in AFTER_A_FAULT)


async def have_data(prometheus: Prometheus, expressions: list[str]) -> None:
    """Send each query as Grafana would."""
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
