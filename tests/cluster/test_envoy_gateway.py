"""A real Envoy Gateway in front of the picker, installed by its chart and ours. The test installs it, uses
it, and kills and replaces its picker under load. The control plane, Envoy Gateway, Envoy, both charts and the
picker are real. A stand-in kubelet runs the pods.
"""

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from tests.cluster.installed import DEADLINE_S, GATEWAY, IMAGES, MODEL, Installed
from tests.cluster.steady_load import prefix, send_completion, steady_load
from tests.cluster.test_whole_story import a_picker_dies_and_all_are_renewed
from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.go_programs import IMAGE, EnvoyGateway
from tests.cluster_env.preparing import create_namespace
from tests.harness.kubelet.images import Image
from tests.harness.kubelet.running import RunningNode, running_node
from tests.harness.processes import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.envoy, pytest.mark.slow, pytest.mark.timeout(1200)]

NAMESPACE: Final = "models"
SYSTEM: Final = "envoy-gateway-system"
CLASS: Final = "envoy"
TENANTS: Final = 6
IN_FLIGHT: Final = 12
AT_LEAST_IN_FLIGHT: Final = 8
ENVOY_IMAGE: Final = "docker.io/envoyproxy/envoy:v1.40.0"
VALUES: Final[dict[str, Any]] = {
    "shape": "gateway",
    "gateway__provider": "envoy-gateway",
    "gateway__httpRoute": {"enabled": True, "parentRefs": [{"name": "inference"}]},
    "longestAnswerSeconds": 60,
    "policy__sampling": {"share": 1.0},
    "config__envoy__messageTimeoutSeconds": 30,  # a busy machine may take the default, 1 s, for one pick
}
GETADDRINFO: Final = "envoy.extensions.network.dns_resolver.getaddrinfo.v3.GetAddrInfoDnsResolverConfig"
BOOTSTRAP: Final = {
    "typed_dns_resolver_config": {
        "name": "envoy.network.dns_resolver.getaddrinfo",
        "typed_config": {"@type": f"type.googleapis.com/{GETADDRINFO}"},
    }
}
"""This cluster has hosts files and no DNS server, and Envoy's own resolver does not read hosts files."""


async def test_envoy_gateway_loses_no_request_while_pickers_die_and_are_renewed(
    own_cluster: ControlPlane,
    envoy_gateway: EnvoyGateway,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for namespace in (NAMESPACE, SYSTEM):
        create_namespace(own_cluster, namespace)
    site = Installed(own_cluster, NAMESPACE)
    images = {**IMAGES, IMAGE: image_of(envoy_gateway)}
    with running_node(own_cluster, images=images, folder=tmp_path / "node") as node:
        await install(site, envoy_gateway)
        url = await gateway_url(site)
        await policies_are_accepted(site)
        await the_picker_is_asked(site, node, url)
        await site.upgrade("gateway", "prefix-gateway", **VALUES, test__url=url, test__model=MODEL)
        assert "Succeeded" in await site.helm("test", "gateway")
        hits = await hits_are_as_predicted(site, node, url)
        await a_client_does_not_name_its_server(node, url)
        connector = node.connector(force_close=True, limit=0)
        with capsys.disabled():
            print(f"\n{hits}")
        async with steady_load(
            connector, url, capsys=capsys, in_flight=IN_FLIGHT, at_least=AT_LEAST_IN_FLIGHT
        ) as load:
            await load.answers(2 * IN_FLIGHT)
            await a_picker_dies_and_all_are_renewed(site, node, load)
        await full_duplex_and_closed_without_the_picker(site, node, url)
        await uninstalled(site)


def image_of(gateway: EnvoyGateway) -> Image:
    binaries = gateway.program.parent
    variables = {"PATH": f"{binaries}:/usr/local/bin:/usr/bin:/bin"}
    return Image(entrypoint=("envoy-gateway",), folders=(str(binaries),), variables=variables)


async def install(site: Installed, gateway: EnvoyGateway) -> None:
    """Install Envoy Gateway as its documentation says, our two charts, and a Gateway."""
    crds = sorted(gateway.crds.rglob("*.yaml"))
    await site.kubectl("apply", "--server-side", *(part for crd in crds for part in ("-f", crd)))
    wait = ("--wait", "--timeout", f"{DEADLINE_S:.0f}s")
    off = ("--set", "crds.enabled=false", "--set", "topologyInjector.enabled=false")
    await asyncio.gather(
        asyncio.to_thread(site.plane.helm, "install", "eg", gateway.chart, "-n", SYSTEM, *off, *wait),
        site.upgrade("servers", "model-server", engine="simulated", replicas=3, profile__model=MODEL),
    )
    documents = json.dumps({"apiVersion": "v1", "kind": "List", "items": a_gateway()})
    await asyncio.to_thread(site.plane.kubectl, "apply", "-f", "-", stdin=documents)
    await site.upgrade("gateway", "prefix-gateway", **VALUES)
    await site.kubectl(
        "wait", "--for=condition=Programmed", "gateway/inference", f"--timeout={DEADLINE_S:.0f}s"
    )


def a_gateway() -> list[dict[str, Any]]:
    """Return a GatewayClass, a Gateway, and settings for running Envoy in this cluster."""
    envoy: dict[str, Any] = {
        "apiVersion": "gateway.envoyproxy.io/v1alpha1",
        "kind": "EnvoyProxy",
        "metadata": {"name": "local", "namespace": SYSTEM},
        "spec": {
            "bootstrap": {"type": "Merge", "value": json.dumps(BOOTSTRAP)},
            "telemetry": {"accessLog": {"disable": True}},
            "provider": {
                "type": "Kubernetes",
                "kubernetes": {
                    "envoyDeployment": {"replicas": 1, "container": {"image": ENVOY_IMAGE}},
                    "envoyService": {"type": "ClusterIP"},
                },
            },
        },
    }
    parameters = {"group": "gateway.envoyproxy.io", "kind": "EnvoyProxy", **envoy["metadata"]}
    controller = "gateway.envoyproxy.io/gatewayclass-controller"
    listener = {"name": "http", "protocol": "HTTP", "port": 80}
    version = "gateway.networking.k8s.io/v1"
    return [
        envoy,
        {
            "apiVersion": version,
            "kind": "GatewayClass",
            "metadata": {"name": CLASS},
            "spec": {"controllerName": controller, "parametersRef": parameters},
        },
        {
            "apiVersion": version,
            "kind": "Gateway",
            "metadata": {"name": "inference", "namespace": NAMESPACE},
            "spec": {"gatewayClassName": CLASS, "listeners": [listener]},
        },
    ]


async def gateway_url(site: Installed) -> str:
    """Return the URL of the Envoy that Envoy Gateway has made."""
    label = "gateway.envoyproxy.io/owning-gateway-name=inference"
    (service,) = (await Installed(site.plane, SYSTEM).get("service", "-l", label))["items"]
    return f"http://{service['spec']['clusterIP']}:80"


async def policies_are_accepted(site: Installed) -> None:
    """Check that Envoy Gateway accepts every object that the chart makes."""
    kinds = ("envoyextensionpolicy", "backendtrafficpolicy", "clienttrafficpolicy", "backendtlspolicy")
    seen: dict[str, Any] = {}

    async def all_accepted() -> bool:
        for kind in (*kinds, "httproute"):
            for found in (await site.get(kind))["items"]:
                status = found.get("status", {})
                parents = status.get("ancestors") or status.get("parents") or []
                conditions = [c for parent in parents for c in parent["conditions"]]
                seen[kind] = {c["type"]: f"{c['status']} {c['message']}" for c in conditions}
        return len(seen) == len(kinds) + 1 and all(
            s.get("Accepted", "").startswith("True") for s in seen.values()
        )

    await wait_until(all_accepted, what=f"Envoy Gateway accepts: {seen}", timeout_s=DEADLINE_S)


async def the_picker_is_asked(site: Installed, node: RunningNode, url: str) -> None:
    """Wait until Envoy has its configuration and knows that the picker is healthy. Before, Envoy
    fails open.
    """
    faults: list[str] = []

    async def asked() -> bool:
        async with aiohttp.ClientSession(connector=node.connector(force_close=True)) as session:
            faults.append((await send_completion(session, url, "is anybody there")).fault)
        return not faults[-1] and bool(await decisions(site, node))

    try:
        await wait_until(asked, what="", timeout_s=120)
    except AssertionError:
        raise AssertionError(
            f"no decision; the last fault: {faults[-1]}\n{await envoy_state(site, node)}"
        ) from None


async def envoy_state(site: Installed, node: RunningNode) -> str:
    """Return Envoy's counters about the picker that are not 0."""
    label = "app.kubernetes.io/component=proxy"
    found = (await Installed(site.plane, SYSTEM).get("pods", "-l", label))["items"]
    url = f"http://{found[0]['status']['podIP']}:19001/stats/prometheus"
    async with (
        aiohttp.ClientSession(connector=node.connector(force_close=True)) as session,
        session.get(url) as response,
    ):
        lines = (await response.text()).splitlines()
    wanted = ("ext_proc", "ssl_", "health", "membership", "cx_connect_fail")
    return "\n".join(
        line for line in lines if any(w in line for w in wanted) and line[-2:] != " 0" and line[:1] != "#"
    )


async def hits_are_as_predicted(site: Installed, node: RunningNode, url: str) -> str:
    """The share of the prompts that pickers expected in the servers' caches is the share that servers found
    there."""
    before = await predicted(site, node)
    cached = tokens = 0
    async with aiohttp.ClientSession(connector=node.connector(force_close=True)) as session:
        for n in range(8 * TENANTS):
            outcome = await send_completion(session, url, f"{prefix(100 + n % TENANTS)} {n}")
            assert not outcome.fault, outcome.fault
            cached, tokens = cached + outcome.cached_tokens, tokens + outcome.prompt_tokens
    after = await predicted(site, node)
    expected = (after[0] - before[0]) / (after[1] - before[1])
    figures = f"{8 * TENANTS} requests of {tokens} tokens: {cached / tokens:.1%} were cached, {expected:.1%} predicted"
    assert cached > 0.7 * tokens, figures
    assert abs(expected - cached / tokens) < 0.1, figures
    sampled = [d for d in await decisions(site, node) if d["cached_tokens"] is not None]
    assert len(sampled) >= 8 * TENANTS, "the picker asked for the bodies of answers and did not get them"
    return figures


async def decisions(site: Installed, node: RunningNode) -> list[dict[str, Any]]:
    """Return the decisions of both pickers."""
    found: list[dict[str, Any]] = []
    async with aiohttp.ClientSession(connector=node.connector(force_close=True)) as session:
        for pod in await site.pods("gateway", component="gateway"):
            async with session.get(f"http://{pod['status']['podIP']}:9090/decisions?limit=1000") as response:
                found += (await response.json())["decisions"]
    return found


async def predicted(site: Installed, node: RunningNode) -> tuple[int, int]:
    """Return two sums over all decisions so far: the tokens expected in a cache, and the tokens of prompts.
    Both are estimates of the pickers.
    """
    made = await decisions(site, node)
    return sum(d["matched_tokens"] for d in made), sum(d["prompt_tokens"] for d in made)


async def a_client_does_not_name_its_server(node: RunningNode, url: str) -> None:
    """The client names an address where no server listens: if Envoy used the address, it would answer 503."""
    headers = {"x-gateway-destination-endpoint": "127.0.0.1:1"}
    async with (
        aiohttp.ClientSession(connector=node.connector(force_close=True), headers=headers) as session,
        session.get(f"{url}/v1/models") as response,
    ):
        assert response.status == 200


async def full_duplex_and_closed_without_the_picker(site: Installed, node: RunningNode, url: str) -> None:
    """Try the chart's other modes: prompts come in pieces, and requests without a picker get no answer."""
    values = {**VALUES, "gateway__failureMode": "FailClose", "gateway__bodies": "FullDuplexStreamed"}
    await site.upgrade("gateway", "prefix-gateway", **values)
    await site.rolled_out(GATEWAY)
    made: list[int] = []

    async def routed() -> bool:
        """Tell whether the picker has read the prompt and routed the request. Envoy applies the new mode when
        it hears of it.
        """
        async with aiohttp.ClientSession(connector=node.connector(force_close=True)) as session:
            made.append((await send_completion(session, url, f"{prefix(300)} {len(made)}")).cached_tokens)
        return made[-1] > 0

    await wait_until(routed, what="a prompt is found in a cache", timeout_s=120)
    async with aiohttp.ClientSession(connector=node.connector(force_close=True)) as session:
        found = [(await send_completion(session, url, f"{prefix(301)} {n}")).cached_tokens for n in range(9)]
    # Each of the two pickers may miss a prefix once: it may be asked before it hears of the other's pick.
    assert found.count(0) <= 2, f"not routed by prefix: {found}"
    await site.kubectl("scale", f"deployment/{GATEWAY}", "--replicas=0")
    part = "app.kubernetes.io/instance=gateway,app.kubernetes.io/component=gateway"
    await site.kubectl("wait", "--for=delete", "pod", "-l", part, f"--timeout={DEADLINE_S:.0f}s")

    async def all_refused() -> bool:
        """Tell whether six requests in a row fail. One alone can fail while Envoy still has the old mode: it
        hears of the new one when it likes, and prompts find caches in both modes.
        """
        async with aiohttp.ClientSession(connector=node.connector(force_close=True)) as session:
            asked = [await send_completion(session, url, "is anybody there") for _ in range(6)]
        return all(each.fault for each in asked)

    await wait_until(all_refused, what="requests fail while no picker is there", timeout_s=120)
    assert await all_refused(), "a request bypassed the picker"
    await site.kubectl("scale", f"deployment/{GATEWAY}", "--replicas=2")
    await site.rolled_out(GATEWAY)
    await wait_until(routed, what="requests are answered again", timeout_s=120)


async def uninstalled(site: Installed) -> None:
    await site.helm("uninstall", "gateway", "--wait")
    kinds = "envoyextensionpolicy,backendtrafficpolicy,clienttrafficpolicy,backendtlspolicy,httproute"
    assert await site.kubectl("get", kinds, "-o", "name") == ""
