"""docs/kubernetes-policy.md shows what kubectl prints of policies. The tests make these outputs and compare
all of them except ages, names, times and the width of columns.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.cluster_env.control_plane import ControlPlane
from tests.harness.site import Site, running_site

pytest_plugins = ["tests.cluster_env.fixtures"]
pytestmark = [pytest.mark.cluster]

PAGE: Final = Path(__file__).parents[2] / "docs" / "kubernetes-policy.md"
_BLOCK: Final = re.compile(r"<!-- kubectl:(\w+) -->\n```\n(.*?)```\n", re.DOTALL)
_VARYING: Final = (
    (re.compile(r"\btest-[0-9a-f]{8}\b"), "models"),
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"), "2026-01-01T12:00:00Z"),
    (re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "0f5c1d2e-7b1a-4c55-9a53-2d1f6f0c8e11"),
    (re.compile(r"(Resource Version: +)\d+"), r"\g<1>1234"),
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
    on_the_page = dict(_BLOCK.findall(PAGE.read_text()))
    assert on_the_page.keys() == shown.keys()
    for name, text in on_the_page.items():
        assert normal(text) == normal(shown[name])


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


def outputs(site: Site) -> dict[str, str]:
    """Return the commands with their outputs, by the name of their place on the page."""

    def run(*arguments: str) -> str:
        printed = site.plane.kubectl(*arguments, "-n", site.namespace)
        return f"$ kubectl {' '.join(arguments)}\n{printed.rstrip()}\n"

    described = run("describe", "prefixroutingpolicy", "typo")
    spec = described.index("\nSpec:\n")
    status = described.index("\nStatus:\n")
    return {
        "get": run("get", "prefixroutingpolicy") + "\n" + run("get", "prefixroutingpolicy", "-o", "wide"),
        "describe": described[:spec] + "\nSpec:\n  ..." + described[status:].partition("\nEvents:")[0] + "\n",
    }


def normal(text: str) -> list[str]:
    """Return the lines of an output as they are in every run."""
    for pattern, instead in _VARYING:
        text = pattern.sub(instead, text)
    return [line.strip() for line in text.splitlines() if line.strip()]
