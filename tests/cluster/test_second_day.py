"""Acts of the second day that `test_whole_story` leaves out, under load: the first server of an empty pool,
long streams across a deletion, an address that another pod had, a drained node, a renewed certificate.
Clients speak TLS, and each pod runs two pickers. The control plane, Prometheus, KEDA, Envoy, the pickers and
the model servers are real. A stand-in kubelet runs the pods. This is one test, because all acts
share the releases. docs/upgrade.md has its table.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import yaml

from tests.cluster.installed import (
    CHARTS,
    DEADLINE_S,
    IMAGES,
    IN_FLIGHT,
    LONGEST_ANSWER_S,
    MODEL,
    SERVERS,
    Installed,
    site_on,
)
from tests.cluster.steady_load import SteadyLoad, prefix, send_completion, steady_load
from tests.cluster_env.control_plane import CommandFailedError, ControlPlane
from tests.cluster_env.go_programs import Keda
from tests.harness.certificate import CERTIFICATE, make_certificate, write_tls
from tests.harness.kubelet.running import RunningNode, running_node
from tests.harness.processes import managed_process, wait_until
from tests.harness.promtool import program

pytestmark = [pytest.mark.cluster, pytest.mark.envoy, pytest.mark.slow, pytest.mark.timeout(1800)]

PROMETHEUS: Final = "127.0.0.1:9999"
WORKERS: Final = 2
LONG_TOKENS: Final = 600
LONG_STREAMS: Final = 6
ADDRESSES: Final = 7
"""Addresses of the node: those of the pods at rest and one more, so that the pods that come later have the
addresses of pods that ended."""
NODE: Final = "node-1"
BURST: Final = 48
EXTERNAL_METRICS: Final = "apiservice/v1beta1.external.metrics.k8s.io"
TARGET: Final = 0.5  # the saturation at which KEDA keeps the number of servers, by the chart's default


async def test_the_acts_of_the_second_day_fail_no_request(
    own_cluster: ControlPlane, keda: Keda, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site, certificates = site_on(own_cluster), tmp_path / "certificates"
    await site.apply_crds()
    certificates.mkdir()
    trusted = trusting(certificates, "first", "second")
    await use_certificate(site, certificates, "first")
    with running_node(
        own_cluster, images=IMAGES, folder=tmp_path / "node", name=NODE, addresses=ADDRESSES
    ) as node:
        await install(site)
        url = (await site.url()).replace("http:", "https:")
        connector = node.connector(force_close=True, limit=0, ssl=trusted)
        lines = await from_zero(site, node, keda, url, trusted, folder=tmp_path)
        with capsys.disabled():
            print(f"\n{lines}")
        await site.kubectl("scale", f"deployment/{SERVERS}", "--replicas=3")
        await site.rolled_out(SERVERS)
        assert "Succeeded" in await site.helm("test", "gateway")
        async with steady_load(connector, url, capsys=capsys) as load:
            await long_streams_outlive_their_pod(site, node, load, url, trusted)
            await an_address_serves_again(site, node, load)
            await the_node_is_drained(site, node, load)
            await the_certificate_is_renewed(site, node, load, certificates)
        # The clients' TLS connections end meanwhile. Python warns of those that are open when a test ends.
        await site.helm("uninstall", "gateway", "--wait")


async def install(site: Installed) -> None:
    """Install both releases, without a model server."""
    await asyncio.gather(
        site.upgrade_servers(replicas=0),
        site.upgrade(
            "gateway",
            "prefix-gateway",
            tls__secretName="clients",
            config__workers=WORKERS,
            config__envoy__maxMessageTimeoutSeconds=600,
            longestAnswerSeconds=LONGEST_ANSWER_S,
        ),
    )
    await site.apply(await site.policy("routing", flow={"waitForServerSeconds": 600}))
    await site.wait_policy("routing", "Programmed", status="True")


@asynccontextmanager
async def prometheus(site: Installed, node: RunningNode, folder: Path) -> AsyncIterator[None]:
    """Run Prometheus in the network of the node. It reads the pickers as an operator's scrape would."""
    pods = await site.pods("gateway", component="gateway")
    targets = [f"{pod['status']['podIP']}:{port}" for pod in pods for port in range(9090, 9090 + WORKERS)]
    scrape = {"targets": targets, "labels": {"namespace": site.namespace}}
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "pickers", "static_configs": [scrape]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    options = (
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--web.listen-address={PROMETHEUS}",
    )
    command = node.inside([str(program("prometheus")), *options])
    async with managed_process("prometheus", command, directory=folder):
        yield


async def scaled_object(site: Installed) -> dict[str, Any]:
    """Return the ScaledObject that the chart makes for a pool that may have no server."""
    keda = f"autoscaling.keda.enabled=true,autoscaling.keda.prometheus=http://{PROMETHEUS}"
    values = (
        f"engine=simulated,profile.model={MODEL},autoscaling.enabled=true,autoscaling.minReplicas=0,{keda}"
    )
    rendered = await site.helm("template", "servers", CHARTS / "model-server", "--set", values)
    (scaled,) = [each for each in yaml.safe_load_all(rendered) if each and each["kind"] == "ScaledObject"]
    return dict(scaled)


@asynccontextmanager
async def kedas_programs(site: Installed, node: RunningNode, keda: Keda, folder: Path) -> AsyncIterator[None]:
    """Run KEDA in the network of the node. It scales by the ScaledObject of the chart, and by the
    HorizontalPodAutoscaler that KEDA makes of it.
    """

    async def kinds_are_known() -> bool:
        crds = (await site.get("crd"))["items"]
        conditions = [each.get("status", {}).get("conditions") or [] for each in crds]
        return all(("Established", "True") in [(c["type"], c["status"]) for c in each] for each in conditions)

    await site.kubectl("apply", "--server-side", "-f", keda.crds)
    await wait_until(kinds_are_known, what="the API server knows KEDA's kinds", timeout_s=120)
    certificates, kubeconfig = folder / "keda", str(site.plane.kubeconfig_inside())
    certificates.mkdir()
    write_tls(certificates)
    (certificates / "ca.crt").write_text(CERTIFICATE)
    names = ("KEDA_CLUSTER_OBJECT_NAMESPACE", "POD_NAMESPACE", "WATCH_NAMESPACE")
    environment = {"KUBECONFIG": kubeconfig, **dict.fromkeys(names, site.namespace)}
    operator = [str(keda.operator), f"--cert-dir={certificates}"]
    adapter = [
        *(str(keda.adapter), f"--cert-dir={certificates}", "--metrics-service-address=127.0.0.1:9666"),
        *(f"--{use}-kubeconfig={kubeconfig}" for use in ("authentication", "authorization", "lister")),
        *("--secure-port=6443", "--port=8082"),  # the operator has 8080 and 8081
    ]
    async with (
        node.forwarded(6443) as port,
        managed_process("keda", node.inside(operator), directory=folder, env=environment) as started,
        managed_process("adapter", node.inside(adapter), directory=folder, env=environment),
    ):
        try:
            for document in external_metrics(site, port):
                await site.apply(document)
            await site.kubectl("wait", "--for=condition=Available", EXTERNAL_METRICS, "--timeout=120s")
            await site.apply(await scaled_object(site))
            await site.kubectl("wait", "--for=condition=Ready", f"scaledobject/{SERVERS}", "--timeout=120s")
            yield
            # The operator ends its HorizontalPodAutoscaler with the object, so that the test may scale again.
            await site.kubectl("delete", f"scaledobject/{SERVERS}", EXTERNAL_METRICS, "--timeout=120s")
        except CommandFailedError as error:
            raise AssertionError(f"{error}\n{started.stderr.read_text()[-4000:]}") from None


def external_metrics(site: Installed, port: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what makes the API server ask KEDA's adapter for metrics, at this port of this machine."""
    service = {"name": "keda-metrics", "namespace": site.namespace}
    outside = {"type": "ExternalName", "externalName": "localhost"}
    group = {"group": "external.metrics.k8s.io", "version": "v1beta1"}
    place = {"service": service | {"port": port}, "insecureSkipTLSVerify": True}
    registered = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": EXTERNAL_METRICS.removeprefix("apiservice/")},
        "spec": {**group, **place, "groupPriorityMinimum": 100, "versionPriority": 100},
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": service, "spec": outside}, registered


async def from_zero(
    site: Installed, node: RunningNode, keda: Keda, url: str, trusted: ssl.SSLContext, *, folder: Path
) -> str:
    """Send a request to a pool without a server. KEDA starts the first server, more load a second one, and
    both end after the load. Return what happened.
    """
    query = (await scaled_object(site))["spec"]["triggers"][0]["metadata"]["query"]
    async with (
        prometheus(site, node, folder),
        aiohttp.ClientSession(connector=node.connector(force_close=True, ssl=trusted)) as session,
    ):

        async def values(of: str) -> list[float]:
            """Return the values of a query. There are none before Prometheus is ready."""
            try:
                async with session.get(f"http://{PROMETHEUS}/api/v1/query", params={"query": of}) as answer:
                    answer.raise_for_status()
                    return [float(each["value"][1]) for each in (await answer.json())["data"]["result"]]
            except (aiohttp.ClientConnectionError, aiohttp.ClientResponseError):
                return []

        async def shows(of: str, value: int) -> bool:
            return await values(of) == [value]

        async def replicas() -> int:
            return int((await site.get("deployment", SERVERS))["spec"]["replicas"])

        async def wait(of: str, value: int, *, what: str) -> None:
            await wait_until(lambda: shows(of, value), what=what, timeout_s=DEADLINE_S)

        async def scaled_to(count: int, *, after: dict[str, Any]) -> None:
            """Change the ScaledObject, so that what follows takes seconds, and wait for this many servers."""
            change = ("--type=merge", "--patch", json.dumps({"spec": after}))
            await site.kubectl("patch", f"scaledobject/{SERVERS}", *change)

            async def scaled() -> bool:
                return await replicas() == count

            await wait_until(scaled, what=f"{count} servers", timeout_s=DEADLINE_S)

        autoscaler, too_few = f"keda-hpa-{SERVERS}", f"{query} > bool {TARGET}"
        await wait("count(epp_sharing_peers >= 1)", 2 * WORKERS, what="all pickers share")
        async with kedas_programs(site, node, keda, folder):
            assert await values(query) == [], "no load is known, so KEDA changes nothing"
            assert await replicas() == 0
            outcome = await send_completion(session, url, "the first of all")
            assert not outcome.fault, f"{outcome.fault}\n{(folder / 'keda.err').read_text()[-4000:]}"
            assert await replicas() == 1
            await wait("min(epp_pool_servers)", 1, what="Prometheus reads the first server")
            assert await shows(too_few, 0), "one request starts one server"
            await site.kubectl("wait", "--for=condition=ScalingActive", f"hpa/{autoscaler}", "--timeout=120s")
            assert await replicas() == 1
            burst = [asyncio.create_task(send_completion(session, url, prefix(n))) for n in range(BURST)]
            await wait("min(epp_pool_servers)", 2, what="a second server")
            assert not [sent.fault for sent in await asyncio.gather(*burst) if sent.fault]
            at_once = {"behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}}
            await scaled_to(1, after={"advanced": {"horizontalPodAutoscalerConfig": at_once}})
            await wait(f"max({query})", 0, what="a pool without work for three minutes")
            await scaled_to(0, after={"cooldownPeriod": 1})
            await site.pods_are(node, "servers", 0)
    return f"from zero: answered after {outcome.seconds:.1f} s"


async def long_streams_outlive_their_pod(
    site: Installed, node: RunningNode, load: SteadyLoad, url: str, trusted: ssl.SSLContext
) -> None:
    """A pod is deleted in the middle of long answers. It stays until it has sent them."""
    with load.phase("a pod deleted, with long streams") as phase:
        async with aiohttp.ClientSession(connector=node.connector(force_close=True, ssl=trusted)) as session:
            streams = [
                asyncio.create_task(
                    send_completion(session, url, f"long {n}", streamed=True, tokens=LONG_TOKENS)
                )
                for n in range(LONG_STREAMS)
            ]
            await load.answers(LONG_STREAMS)
            assert not any(stream.done() for stream in streams)
            victim = (await site.pods("servers"))[0]["metadata"]["name"]
            await site.kubectl("delete", "pod", victim, "--wait=false")
            phase.outcomes += await asyncio.gather(*streams)
        await site.rolled_out(SERVERS)
        await site.pods_are(node, "servers", 3)


async def an_address_serves_again(site: Installed, node: RunningNode, load: SteadyLoad) -> None:
    """A new server gets the address of a server that has ended."""

    async def addresses() -> set[str]:
        return {pod["status"]["podIP"] for pod in await site.pods("servers")}

    with load.phase("an address used again"):
        ended = await addresses()
        await site.kubectl("scale", f"deployment/{SERVERS}", "--replicas=2")
        await site.pods_are(node, "servers", 2)
        stayed = await addresses()
        await site.kubectl("scale", f"deployment/{SERVERS}", "--replicas=4")
        await site.rolled_out(SERVERS)
        await load.answers(IN_FLIGHT)
        assert await addresses() - stayed & ended, "a new pod has an address that was free"
        await site.kubectl("scale", f"deployment/{SERVERS}", "--replicas=3")
        await site.pods_are(node, "servers", 3)


async def the_node_is_drained(site: Installed, node: RunningNode, load: SteadyLoad) -> None:
    """The node is closed to new pods and every pod is evicted, by the disruption budgets. The same node, open
    again, then stands for the one to which the pods move.
    """
    before = {pod["metadata"]["name"] for pod in (await site.get("pods"))["items"]}
    with load.phase("the node drained"):
        command = ("drain", NODE, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=600s")
        drain = asyncio.create_task(site.kubectl(*command))

        async def closed() -> bool:
            return bool((await site.get("node", NODE))["spec"].get("unschedulable"))

        await wait_until(closed, what="the node is closed")
        await site.kubectl("uncordon", NODE)
        await drain
        await site.kubectl("wait", "--for=condition=Available", "deployment", "--all", "--timeout=240s")
        await site.pods_are(node, "servers", 3)
        await load.answers(IN_FLIGHT)
    assert not before & {pod["metadata"]["name"] for pod in (await site.get("pods"))["items"]}


def trusting(folder: Path, *names: str) -> ssl.SSLContext:
    """Return a context that trusts new certificates of these names, for any address."""
    context = ssl.create_default_context()
    context.check_hostname = False
    for name in names:
        if not (folder / f"{name}.crt").exists():
            make_certificate(folder, name)
        context.load_verify_locations(cafile=str(folder / f"{name}.crt"))
    return context


async def use_certificate(site: Installed, folder: Path, name: str) -> None:
    """Write the certificate into the Secret of the gateway."""
    data = {f"tls.{part}": (folder / f"{name}.{part}").read_text() for part in ("crt", "key")}
    head = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "clients"}}
    await site.apply(head | {"type": "kubernetes.io/tls", "stringData": data})


async def the_certificate_is_renewed(
    site: Installed, node: RunningNode, load: SteadyLoad, folder: Path
) -> None:
    second = trusting(folder, "second")
    with load.phase("the certificate renewed"):
        await use_certificate(site, folder, "second")

        async def shown_by_all() -> bool:
            places = [pod["status"]["podIP"] for pod in await site.pods("gateway", component="gateway")]
            return all([await shows(node, address, second) for address in places])

        await wait_until(shown_by_all, what="both gateways show the new certificate", timeout_s=120)
        await load.answers(IN_FLIGHT)


async def shows(node: RunningNode, address: str, trusted: ssl.SSLContext) -> bool:
    """Tell whether Envoy shows a certificate that this context trusts."""
    try:
        _, writer = await node.connect(address, 8080, ssl=trusted, server_hostname=address)
    except ssl.SSLCertVerificationError:
        return False
    writer.close()
    return True
