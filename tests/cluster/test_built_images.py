"""Both charts on the images that buildah built, read-only, with nothing of this machine."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import pytest

from tests.cluster.installed import CHARTS, IMAGES, MODEL, Installed
from tests.cluster_env.control_plane import ControlPlane
from tests.harness.kubelet.images import built_image
from tests.harness.kubelet.running import RunningNode, running_node
from tests.image_env.environment import BuiltImage

pytestmark = [pytest.mark.cluster, pytest.mark.envoy, pytest.mark.timeout(600)]

OTHER = "another-model"
LOAD = ["--users", "2", "--time", "3"]
REPORT = """
import os
try:
    open("/opt/venv/written", "w")
except OSError:
    print(os.getuid(), "read-only", end=" ")
"""
PROMPT = "The same beginning, again and again. " * 60


async def test_the_images_carry_requests_by_prefix(
    cluster: ControlPlane, namespace: str, built_images: Mapping[str, BuiltImage], tmp_path: Path
) -> None:
    built = {
        f"prefix-gateway/{name}": built_image(made.root, made.config) for name, made in built_images.items()
    }
    site = Installed(cluster, namespace)
    with running_node(cluster, images={**IMAGES, **built}, folder=tmp_path / "node") as node:
        one = {"drain__settleSeconds": 1, "podDisruptionBudget__enabled": False}
        simulated = {**one, "engine": "simulated"}
        # A request that bypasses the picker, on a busy machine, may go to a server of the other model.
        patient = {"config__envoy__messageTimeoutSeconds": 30}
        gateway = {**one, **patient, "replicas": 1, "test__model": MODEL}
        await asyncio.gather(
            site.upgrade("servers", "model-server", replicas=2, profile__model=MODEL, **simulated),
            site.upgrade("others", "model-server", replicas=1, profile__model=OTHER, **simulated),
            site.upgrade("gateway", "prefix-gateway", **gateway),
        )
        assert "Succeeded" in await site.helm("test", "gateway")
        assert await cached(site, node) > 0
        assert await answers(site, node) == {200: 48}, "two releases, two models, one pool label, one gateway"
        assert await output_of(site, node, "picker", REPORT) == "65532 read-only"
        assert await output_of(site, node, "model-server", REPORT) == "65532 read-only"
        load = {"enabled": True, "image": {"repository": "prefix-gateway/load"}, "args": LOAD}
        values = f"--set-json=loadTest={json.dumps(load)}"
        await site.helm("upgrade", "gateway", CHARTS / "prefix-gateway", "--reset-then-reuse-values", values)
        await site.kubectl("wait", "--for=condition=Complete", "job", "--all", "--timeout=240s")
        await site.helm("uninstall", "gateway", "servers", "others")


async def completions_url(site: Installed) -> str:
    return f"{await site.url()}/v1/completions"


async def answers(site: Installed, node: RunningNode) -> Counter[int]:
    """Return the statuses of 24 requests for each model, by turns: a server that has another model answers
    404.
    """
    url, statuses = await completions_url(site), Counter[int]()
    async with aiohttp.ClientSession(connector=node.connector(force_close=True)) as session:
        for n in range(48):
            body = {"model": (MODEL, OTHER)[n % 2], "prompt": f"{n} {PROMPT}", "max_tokens": 1}
            async with session.post(url, json=body) as response:
                statuses[response.status] += 1
                await response.read()
    return statuses


async def cached(site: Installed, node: RunningNode) -> int:
    """Return how many prompt tokens the second of two equal requests found in the cache of its server."""
    url = await completions_url(site)
    tokens = 0
    async with aiohttp.ClientSession(connector=node.connector(force_close=True)) as session:
        for _ in range(2):
            async with session.post(
                url, json={"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
            ) as response:
                assert response.status == 200, await response.text()
                tokens = (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(tokens)


async def output_of(site: Installed, node: RunningNode, name: str, code: str) -> str:
    """Return the output of `code` in a pod that names no user. The user of the image then counts."""
    security = {"readOnlyRootFilesystem": True, "runAsNonRoot": True, "allowPrivilegeEscalation": False}
    command = ["python", "-I", "-c", code]
    container = {
        "name": "main",
        "image": f"prefix-gateway/{name}",
        "command": command,
        "securityContext": security,
    }
    spec = {"containers": [container], "restartPolicy": "Never", "automountServiceAccountToken": False}
    metadata = {"name": f"report-{name}", "namespace": site.namespace}
    await site.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    await site.kubectl(
        "wait", "--for=jsonpath={.status.phase}=Succeeded", f"pod/report-{name}", "--timeout=120s"
    )
    return node.log(f"{site.namespace}/report-{name}", "main").strip()
