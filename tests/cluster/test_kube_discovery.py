"""A picker process follows a pool on a real API server. Pods start, come, go and move. Several models behind
one picker on a real API server, in three InferencePools that come and go. docs/kubernetes-policy.md shows
what kubectl prints of policies. The tests make these outputs and compare them except for ages and the
width of columns.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path
from typing import Final

import grpc
import pytest

from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.preparing import create_namespace
from tests.harness.data_plane import BUFFERED, DESTINATION, DUPLEX, StreamExchange, exchange
from tests.harness.gateway import PickerProcess, running_picker
from tests.harness.processes import wait_until
from tests.harness.simulated_pool import (
    Policies,
    install_policy_crd,
    picker_account,
    policy_document,
    running_servers,
    simulated_pool,
)
from tests.harness.site import Site, admin, running_site, site_config

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


async def test_by_default_requests_wait_while_a_pod_is_starting(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with (
        running_site(cluster, namespace, tmp_path) as site,
        grpc.aio.insecure_channel(f"unix:{tmp_path}/picker.sock") as channel,
    ):

        async def asked() -> int:
            async with exchange(channel, mode=DUPLEX) as one:
                await one.send(json.dumps({"model": "m", "prompt": "x"}).encode())
                return one.immediate.status if one.immediate else 200

        assert await asked() == 503
        await site.pool.add(site.hosts(1), started=False)
        tasks: list[asyncio.Task[int]] = []

        async def waits() -> bool:
            tasks.append(asyncio.create_task(asked()))
            answered, _ = await asyncio.wait(tasks[-1:], timeout=1.0)
            return not answered

        await wait_until(waits, what="a request is not refused at once")
        await site.pool.report(site.hosts(1))
        assert await tasks[-1] == 200
        await site.pool.report(site.hosts(1), ready=False)
        await site.wait_addresses()
        assert await asked() == 503, "a server that has started and is not ready is not waited for"


_POOLS = ["llama", "mistral", "qwen"]


_PODS = 2


"""The pods of each pool."""


class EnvoyCaller:
    """Asks the picker as Envoy does."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def where(self, model: str) -> str:
        """Return the first destination of a request for the model, or the status and the text of the picker's
        own answer.
        """
        body = json.dumps({"model": model, "prompt": "x" * 2000}).encode()
        async with exchange(self._channel, mode=BUFFERED) as one:
            await one.send(body)
            return _answer(one)

    async def models(self) -> list[str]:
        async with exchange(self._channel, mode=BUFFERED) as one:
            await one.send(method="GET", path="/v1/models")
            if one.immediate is None or one.immediate.status != 200:
                return []  # no server has answered yet, or there is no server
            return [card["id"] for card in json.loads(one.immediate.body)["data"]]


def _answer(one: StreamExchange) -> str:
    if one.immediate is not None:
        return f"{one.immediate.status} {json.loads(one.immediate.body)['error']['code']}"
    return dict(one.request.headers)[DESTINATION].split(",")[0]


async def test_the_model_chooses_among_pools_that_come_and_go(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    install_policy_crd(cluster)
    account = picker_account(cluster, namespace, pools=_POOLS)
    config = site_config(tmp_path, account, kubernetes={"pool": "", "pools": _POOLS, "service": "picker"})
    async with (
        running_servers(_PODS * len(_POOLS)) as servers,
        simulated_pool(cluster, namespace) as simulated,
    ):
        pods = {
            pool: {f"{pool}-{n}": servers.host(_PODS * at + n) for n in range(_PODS)}
            for at, pool in enumerate(_POOLS)
        }
        for pool, hosts in pods.items():
            servers.models |= {host: [f"{pool}-8b"] for host in hosts.values()}
            await simulated.add(hosts, labels={"model": pool})

        async def create(pool: str) -> None:
            await simulated.create(name=pool, ports=[servers.port], labels={"model": pool})

        def places(pool: str) -> set[str]:
            return {f"{host}:{servers.port}" for host in pods[pool].values()}

        await create("llama")
        await create("mistral")
        async with (
            running_picker(config, directory=tmp_path) as picker,
            grpc.aio.insecure_channel(f"unix:{picker.process.stderr.parent}/picker.sock") as channel,
        ):
            client = EnvoyCaller(channel)
            for _ in range(8):  # The check starts with the first request, since a start waits for the lists.
                assert await client.where("llama-8b") in places("llama")
                assert await client.where("mistral-8b") in places("mistral")
            assert await client.where("qwen-8b") == "404 model_not_found", "its pool does not exist yet"
            assert await client.models() == ["llama-8b", "mistral-8b"]

            await create("qwen")
            await wait_until(
                lambda: _is(client, ["llama-8b", "mistral-8b", "qwen-8b"]), what="the third pool is there"
            )
            for pool in _POOLS * 4:
                assert await client.where(f"{pool}-8b") in places(pool)

            await _the_policy_targets_the_picker(Policies(cluster, simulated), picker, cluster, namespace)

            await simulated.delete("mistral")
            await wait_until(lambda: _is(client, ["llama-8b", "qwen-8b"]), what="the pool is gone")
            assert await client.where("mistral-8b") == "404 model_not_found"
            for pool in ("llama", "qwen") * 4:
                assert await client.where(f"{pool}-8b") in places(pool)
            page = (await admin(picker, "endpoints"))["endpoints"]
            assert {(e["name"].partition("-")[0], e["pool"]) for e in page} == {
                ("llama", "llama"),
                ("qwen", "qwen"),
            }

            await simulated.remove(pods["qwen"])
            await wait_until(lambda: _is(client, ["llama-8b"]), what="the pool has no pods")
            assert await client.where("qwen-8b") == "503 no_ready_endpoint", "its pool exists"


async def _is(client: EnvoyCaller, models: list[str]) -> bool:
    return await client.models() == models


async def _the_policy_targets_the_picker(
    policies: Policies, picker: PickerProcess, cluster: ControlPlane, namespace: str
) -> None:
    """A policy of one pool changes no pick, and its status says what to write. A policy of the picker routes
    for all pools.
    """
    for name, target in (("one-pool", {"name": "mistral"}), ("all", {"kind": "Service", "name": "picker"})):
        document = json.loads(policy_document(name, rule="affinity"))
        document["spec"]["targetRef"] = target
        cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(document))
        if name == "one-pool":
            await policies.wait_conditions(name, "Accepted=False/Invalid@1", "Programmed=False/Invalid@1")
            assert (await admin(picker, "policy"))["metadata"]["name"] == "default"
    await policies.wait_conditions("all", "Accepted=True/Accepted@1", "Programmed=True/Programmed@1")
    refused = (await policies.read("one-pool"))["status"]["conditions"][0]["message"]
    assert "write {kind: Service, name: picker}" in refused
    assert (await admin(picker, "policy"))["metadata"]["name"] == "all"


PAGE: Final = Path(__file__).parents[2] / "docs" / "kubernetes-policy.md"


_BLOCK: Final = re.compile(r"<!-- kubectl -->\n```\n(.*?)```\n", re.DOTALL)


_VARYING: Final = (
    (re.compile(r" \d+[ms](\d+s)?(?=\s)"), " 5m"),
    (re.compile(r" +"), " "),
)


async def test_the_page_equals_the_output_of_kubectl(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with running_site(cluster, namespace, tmp_path, pods=3) as site:
        await a_pool_with_policies(site)
        shown = outputs(site)
    explained = cluster.kubectl("explain", "prefixroutingpolicy.spec.load")
    assert "Largest number of requests that may wait in the queue of a server" in explained
    (on_the_page,) = _BLOCK.findall(PAGE.read_text())
    assert normal(on_the_page) == normal(shown)


async def a_pool_with_policies(site: Site) -> None:
    """Make four policies: the first routes, the second is tried, the third is in conflict, and the status of
    the fourth refuses it. Wait until each status says so.
    """
    await site.wait_addresses(*(f"{site.servers.host(n)}:{site.servers.port}" for n in range(3)))
    site.policies.apply(
        "chat", gain={"minMatchTokens": 128}, load={"maxWaiting": 64, "whenSaturated": "Reject"}
    )
    await site.policies.wait_conditions("chat", "Accepted=True/Accepted@1", "Programmed=True/Programmed@1")
    site.policies.apply("other", rule="affinity")
    site.policies.apply("trial", rule="round-robin", mode="DryRun")
    site.policies.apply("typo", sessionHeader="host")
    await site.policies.wait_conditions(
        "other", "Accepted=False/Conflicted@1", "Programmed=False/Conflicted@1"
    )
    await site.policies.wait_conditions("trial", "Accepted=True/Accepted@1", "Programmed=False/DryRun@1")
    await site.policies.wait_conditions("typo", "Accepted=False/Invalid@1", "Programmed=False/Invalid@1")


def outputs(site: Site) -> str:
    """Return the commands with their outputs."""

    def run(*arguments: str) -> str:
        command = ("get", "prefixroutingpolicy", *arguments)
        return f"$ kubectl {shlex.join(command)}\n{site.plane.kubectl(*command, '-n', site.namespace)}\n"

    message = ("typo", "-o", "jsonpath={.status.conditions[0].message}")
    return run() + run("-o", "wide") + run(*message)


def normal(text: str) -> list[str]:
    """Return the lines of an output as they are in every run."""
    for pattern, instead in _VARYING:
        text = pattern.sub(instead, text)
    return [line.strip() for line in text.splitlines() if line.strip()]
