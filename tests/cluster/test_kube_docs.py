"""docs/kubernetes-policy.md shows what kubectl prints, except for ages and the width of columns."""

import re
import shlex
from pathlib import Path
from typing import Final

import pytest

from tests.cluster_env.control_plane import ControlPlane
from tests.harness.site import Site, running_site

pytestmark = [pytest.mark.cluster]

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
