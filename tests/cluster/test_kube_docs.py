"""docs/kubernetes-policy.md shows what kubectl prints of policies. The tests make these outputs and compare
all of them except ages, names and times. `DOCS_REWRITE=1` writes the page's outputs anew.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import pytest

from tests.cluster_env.control_plane import ControlPlane
from tests.harness.site import Site, running_site

pytest_plugins = ["tests.cluster_env.fixtures"]
pytestmark = [pytest.mark.cluster]

PAGE: Final = Path(__file__).parents[2] / "docs" / "kubernetes-policy.md"
_BLOCK: Final = re.compile(r"(<!-- kubectl:(\w+) -->\n)(?:```\n.*?```\n)?", re.DOTALL)
_VARYING: Final = (
    (re.compile(r"\btest-[0-9a-f]{8}\b"), "models"),
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"), "2026-01-01T12:00:00Z"),
    (re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "0f5c1d2e-7b1a-4c55-9a53-2d1f6f0c8e11"),
    (re.compile(r"(Resource Version: +)\d+"), r"\g<1>1234"),
)


async def test_the_page_equals_the_output_of_kubectl(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with running_site(cluster, namespace, tmp_path, pods=3) as site:
        await a_pool_with_policies(site)
        shown = {name: normal(text) for name, text in outputs(site).items()}
    explained = cluster.kubectl("explain", "prefixroutingpolicy.spec.load")
    assert "Largest number of requests that may wait in the queue of a server" in explained
    page = PAGE.read_text()
    wanted = _BLOCK.sub(lambda found: f"{found[1]}```\n{shown[found[2]]}```\n", page)
    if os.environ.get("DOCS_REWRITE") == "1":
        PAGE.write_text(wanted)
        page = wanted
    assert page == wanted, "run it with DOCS_REWRITE=1"


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


def normal(text: str) -> str:
    """Make an output the same for every run: replace ages, times, versions, ids and the namespace, and remove
    spaces at the ends of lines.
    """
    for pattern, instead in _VARYING:
        text = pattern.sub(instead, text)
    lines = text.splitlines()
    for start in [n for n, line in enumerate(lines) if line.startswith("NAME ")]:
        end = next((n for n in range(start, len(lines)) if not lines[n]), len(lines))
        lines[start:end] = table(lines[start:end])
    return "\n".join(line.rstrip() for line in lines) + "\n"


def table(lines: list[str]) -> list[str]:
    """Return kubectl's table with every age as `5m` and with columns as wide as their content."""
    header = lines[0]
    starts = [found.start() for found in re.finditer(r"(?:(?<=   )|^)\S", header)]
    ends = [*starts[1:], None]
    rows = [[line[a:b].strip() for a, b in zip(starts, ends, strict=True)] for line in lines]
    age = rows[0].index("AGE")
    for row in rows[1:]:
        row[age] = "5m"
    widths = [max(len(row[n]) for row in rows) for n in range(len(starts))]
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
