"""A picker process follows a pool on a real API server. Pods come, go, restart and move, and the API server
is away for a while.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path

import aiohttp
import grpc
import pytest

from epp.base.types import ApiKind, EndpointName, InferenceRequest
from epp.config.kubernetes import Kubernetes
from epp.config.policy import DEFAULT_POLICY
from epp.picker.decision import PickRequest
from epp.picker.picker import Picker
from epp.sources.keep import Sources
from epp.sources.kube.api import Api, Query
from epp.sources.kube.objects import Pod
from epp.sources.kube.pools import Pools
from epp.sources.kube.reflector import ListSource, Reflector
from epp.tools.conformance.dataplane import BUFFERED, DESTINATION, exchange
from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.preparing import create_namespace, install_inference_pool
from tests.harness.processes import wait_until
from tests.harness.simulated_pool import POOL, SimulatedPool, picker_account, simulated_pool
from tests.harness.site import Site, admin, running_site

pytest_plugins = ["tests.cluster_env.fixtures"]
pytestmark = [pytest.mark.cluster]


def at(site: Site, *numbers: int, port: int = 0) -> list[str]:
    return [f"{site.servers.host(n)}:{port or site.servers.port}" for n in numbers]


async def test_pods_come_go_move_and_change_ports(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with running_site(cluster, namespace, tmp_path, pods=2) as site:
        await site.wait_addresses(*at(site, 0, 1))
        assert set(await site.endpoints()) == {
            f"pod-0000:{site.servers.port}",
            f"pod-0001:{site.servers.port}",
        }

        await site.pool.add(site.hosts(1, start=2))
        await site.wait_addresses(*at(site, 0, 1, 2))

        await site.pool.report(site.hosts(1), ready=False)
        await site.wait_addresses(*at(site, 1, 2))

        await site.pool.report({"pod-0001": site.servers.host(5)})
        await site.wait_addresses(*at(site, 5, 2))

        await site.pool.remove(["pod-0002"])
        await site.wait_addresses(*at(site, 5))

        other = site.servers.port + 1
        await site.pool.change({"targetPorts": [{"number": site.servers.port}, {"number": other}]})
        await site.wait_addresses(*at(site, 5), *at(site, 5, port=other))


async def test_without_the_crd_of_pools_pods_are_found_by_labels_and_ports(
    own_cluster: ControlPlane, tmp_path: Path
) -> None:
    """This control plane does not have the CRD of InferencePool."""
    create_namespace(own_cluster, "models")
    async with running_site(
        own_cluster,
        "models",
        tmp_path,
        pods=2,
        pool=False,
        kubernetes={"selector": {"app": "vllm"}, "targetPorts": [8000, 8001]},
    ) as site:
        await site.wait_addresses(*at(site, 0, 1, port=8000), *at(site, 0, 1, port=8001))
        site.policies.apply("p", rule="affinity")
        await site.wait_policy("p", rule="affinity")


async def test_a_restarted_container_comes_back_with_a_cold_cache(
    cluster: ControlPlane, namespace: str
) -> None:
    """The pod keeps its name and address and is never seen not Ready.
    The picker drops the prefix table of this pod and keeps the table of its neighbour.
    """
    picker = Picker(DEFAULT_POLICY, rng=random.Random(1))
    account = picker_account(cluster, namespace)
    settings = Kubernetes(pool=POOL, kubeconfig=str(account))
    api = await Api.connect(settings)
    watch = Pools(
        api,
        settings,
        namespace=namespace,
        on_endpoints=lambda endpoints, _: picker.set_endpoints(endpoints, now=0.0),
        on_pool=lambda: None,
        on_state=lambda *_: None,
        keep=Sources(rng=random.Random(1)).keep,
        rng=random.Random(1),
    )
    task = asyncio.create_task(watch.run())
    try:
        async with simulated_pool(cluster, namespace) as pool:
            await pool.create(ports=[8000])
            await pool.add({"a": "10.0.0.1", "b": "10.0.0.2"})
            await wait_until(lambda: len(picker.endpoints()) == 2, what="the picker has both endpoints")
            for n in range(20):
                prompt = random.Random(n).randbytes(2000).hex().encode()
                inference = InferenceRequest(kind=ApiKind.COMPLETIONS, model="m", prompt=prompt)
                pick = picker.pick(PickRequest("r", inference), now=0.0)
                picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=0.0)
                picker.end(pick, outcome="ended", now=0.0)
            a, b = EndpointName("a:8000"), EndpointName("b:8000")
            kept = picker.table.mirrors[b].entries
            assert picker.table.mirrors[a].entries > 0 < kept
            await pool.restart("a", "10.0.0.1")
            await wait_until(lambda: picker.table.mirrors[a].entries == 0, what="the table for it is dropped")
            assert picker.table.mirrors[b].entries == kept

            await pool.report({"b": "10.0.0.2"}, ready=False)
            await wait_until(lambda: [e.name for e in picker.endpoints()] == [a], what="pod b has left")
            await pool.report({"b": "10.0.0.2"})
            await wait_until(lambda: len(picker.endpoints()) == 2, what="pod b is back")
            assert picker.table.mirrors[b].entries == kept, "the same process, a moment later"
            watch.check_integrity()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.close()


class Late:
    """Passes everything to the API server, but makes the first list look very old: the changes since then are
    no longer known.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self.lists = 0

    async def request(self, method: str, path: str, *, query: Query = ()) -> bytes:
        answer = await self._api.request(method, path, query=query)
        self.lists += 1
        if self.lists > 1:
            return answer
        document = json.loads(answer)
        document["metadata"]["resourceVersion"] = "1"
        return json.dumps(document).encode()

    def watch(self, path: str, *, query: Query, idle_s: float) -> AsyncGenerator[bytes]:
        return self._api.watch(path, query=query, idle_s=idle_s)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_picker_finds_all_pods_of_ten_pools_and_their_lists_of_models(
    cluster: ControlPlane, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each pool has its own model. The test prints how soon the pods are found and what they cost."""
    pools = [f"pool-{n}" for n in range(10)]
    figures = []
    async with running_site(cluster, namespace, tmp_path, servers=1000, pools=pools) as site:
        for filled in (2, 10):
            known = len(await site.endpoints())
            hosts: dict[str, str] = {}
            for n in range(known // 100, filled):
                pods = site.hosts(100, start=100 * n)
                site.servers.models |= {host: [f"model-{n}"] for host in pods.values()}
                await site.pool.make(pods, labels={"pool": pools[n]})
                hosts |= pods
            used = cpu_s(site)
            began = time.monotonic()
            await site.pool.report(hosts)
            reported = time.monotonic()
            count = 100 * filled

            async def found(wanted: int = count) -> bool:
                return len(await site.endpoints()) == wanted

            await wait_until(found, what=f"{count} endpoints", timeout_s=300)
            done = time.monotonic()
            figures.append(
                f"{count - known} more pods reported Ready within {reported - began:.1f} s: all {count} are endpoints "
                f"{max(0.0, done - reported):.2f} s after the last; {cpu_s(site) - used:.1f} s of CPU, {rss_mib(site):.0f} MiB"
            )
            await wait_until(lambda: _all_listed(site), what="every list is known", timeout_s=120)
            figures.append(f"all lists of models are known {time.monotonic() - done:.1f} s later")
            used, began, looks = cpu_s(site), time.monotonic(), site.servers.looks

            def looked(wanted: int = looks + 5 * count) -> bool:
                return site.servers.looks >= wanted

            await wait_until(looked, what="five rounds of scrapes at rest", timeout_s=120)
            took = time.monotonic() - began
            figures.append(
                f"at rest, with {(site.servers.looks - looks) / took:.0f} scrapes a second of {count} endpoints: "
                f"{100 * (cpu_s(site) - used) / took:.0f} % of a core"
            )
        await _each_model_goes_to_its_pool(site, len(pools))
    with capsys.disabled():
        print("\n" + "\n".join(figures))


async def _all_listed(site: Site) -> bool:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{site.picker.admin_urls[0]}/metrics") as page,
    ):
        return "epp_endpoints_without_model_list 0" in await page.text()


async def _each_model_goes_to_its_pool(site: Site, pools: int) -> None:
    async with grpc.aio.insecure_channel(f"unix:{site.picker.process.stderr.parent}/picker.sock") as channel:
        for n in range(pools):
            allowed = {f"{host}:{site.servers.port}" for host in site.hosts(100, start=100 * n).values()}
            for _ in range(3):
                async with exchange(channel, mode=BUFFERED) as one:
                    await one.send(json.dumps({"model": f"model-{n}", "prompt": "x" * 2000}).encode())
                    assert set(dict(one.request.headers)[DESTINATION].split(",")) <= allowed


def cpu_s(site: Site) -> float:
    fields = Path(f"/proc/{site.picker.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def rss_mib(site: Site) -> float:
    pages = int(Path(f"/proc/{site.picker.process.pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


async def follow_from_the_distant_past(pool: SimulatedPool) -> None:
    """An API server that has just started knows nothing of earlier changes: it answers 410, and the picker
    lists the pods anew.
    """
    names: set[str] = set()

    class Names:
        def replace(self, pods: Iterable[Pod]) -> None:
            names.clear()
            names.update(pod.metadata.name for pod in pods)

        def put(self, pod: Pod) -> None:
            names.add(pod.metadata.name)

        def remove(self, pod: Pod) -> None:
            names.discard(pod.metadata.name)

    late, states = Late(pool.api), list[bool]()
    reflector = Reflector(
        late,
        ListSource(what="pods", kind=Pod, path=f"/api/v1/namespaces/{pool.namespace}/pods"),
        sink=Names(),
        on_change=lambda: None,
        on_state=lambda _, answers: states.append(answers),
        rng=random.Random(1),
    )
    task = asyncio.create_task(reflector.run())
    try:
        await wait_until(lambda: late.lists == 2, what="the picker lists the pods again")
        before = set(names)
        await pool.add({"late": "10.0.0.2"})
        await wait_until(
            lambda: names == before | {"late"}, what="the picker follows the changes after the list"
        )
        await pool.remove(["late"])
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert states == [True], "the list never failed"
    reflector.check_integrity()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_an_api_server_that_is_away_changes_nothing_until_it_returns(
    own_cluster: ControlPlane, tmp_path: Path
) -> None:
    install_inference_pool(own_cluster)
    create_namespace(own_cluster, "models")
    async with running_site(own_cluster, "models", tmp_path, pods=2) as site:
        site.policies.apply("p", rule="affinity")
        await site.wait_policy("p", rule="affinity")
        own_cluster.kill_api_server()

        async def noticed() -> bool:
            return await site.picker.metric("epp_kubernetes_followed", resource="pods") == 0

        await wait_until(noticed, what="the picker sees that the API server is away")
        await site.wait_addresses(*at(site, 0, 1))
        assert (await admin(site.picker, "policy"))["metadata"]["name"] == "p"

        own_cluster.start_api_server()
        async with simulated_pool(own_cluster, "models") as pool:
            await pool.add(site.hosts(1, start=2))
            await pool.remove(["pod-0000"])
            await follow_from_the_distant_past(pool)
        await site.wait_addresses(*at(site, 1, 2))
        assert await site.picker.metric("epp_kubernetes_followed", resource="pods") == 1
        site.policies.apply("p", rule="random")
        await site.wait_policy("p", rule="random")
