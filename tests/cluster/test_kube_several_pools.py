"""Several models behind one picker on a real API server, in three InferencePools that come and go."""

import json
from pathlib import Path

import grpc
import pytest

from tests.cluster_env.control_plane import ControlPlane
from tests.harness.data_plane import BUFFERED, DESTINATION, StreamExchange, exchange
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
from tests.harness.site import site_config

pytestmark = [pytest.mark.cluster]

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
            page = (await picker.page("endpoints"))["endpoints"]
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
            assert (await picker.page("policy"))["metadata"]["name"] == "default"
    await policies.wait_conditions("all", "Accepted=True/Accepted@1", "Programmed=True/Programmed@1")
    refused = (await policies.read("one-pool"))["status"]["conditions"][0]["message"]
    assert "write {kind: Service, name: picker}" in refused
    assert (await picker.page("policy"))["metadata"]["name"] == "all"
