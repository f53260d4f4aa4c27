"""From the last release to this one and back, under load, as docs/upgrade.md says: charts, pickers, the
table in Valkey and a stored policy are those of both releases. The last release's files come from the
history of this repository.
"""

import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any, Final

import pytest

from tests.cluster.installed import CHARTS, DEADLINE_S, IMAGES, MODEL, Installed, site_on
from tests.cluster.steady_load import Phase, SteadyLoad, steady_load
from tests.cluster_env.control_plane import ControlPlane
from tests.harness.kubelet.images import REPOSITORY, Image
from tests.harness.kubelet.running import running_node

pytestmark = [pytest.mark.cluster, pytest.mark.envoy, pytest.mark.slow, pytest.mark.timeout(2400)]

RELEASE: Final = "0.1.0"
COMMIT: Final = "d1b2a812fc91677fd2f0d3bad8d07fcb7d2967d8"
IN_FLIGHT: Final = 12
OLD_IMAGE: Final = "last/picker"
VALUES: Final = ("autoscaling.enabled=false", "replicas=2", "longestAnswerSeconds=60")
SPEC: Final[dict[str, Any]] = {
    "rule": "least-cost",
    "gain": {"minMatchTokens": 128},
    "flow": {"mode": "Hold"},
}


def last_release(folder: Path) -> Path:
    """Return a checkout of the last release with a program `bin/epp`. Its C extensions are optional, and are
    not built. A clone without its commit skips the test.
    """
    command = ["git", "-C", str(REPOSITORY), "archive", COMMIT, "epp", "deploy/helm"]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"the commit of {RELEASE} is not in this clone; git fetch --unshallow brings it")
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
        archive.extractall(folder, filter="data")
    program = folder / "bin" / "epp"
    program.parent.mkdir()
    program.write_text("#!/usr/bin/env python\nfrom epp.cli import main\n\nraise SystemExit(main())\n")
    program.chmod(0o755)
    return folder


def images(old: Path) -> dict[str, Image]:
    """Return today's images, and the picker's image of the last release."""
    today = IMAGES["prefix-gateway/picker"]
    variables = {"PATH": f"{old}/bin:{today.variables['PATH']}", "PYTHONPATH": str(old)}
    image = Image(entrypoint=("epp",), folders=(*today.folders, str(old)), variables=variables)
    return {**IMAGES, OLD_IMAGE: image}


async def install(site: Installed, chart: Path, *more: str) -> None:
    command = ("upgrade", "--install", "gateway", chart, "--set", ",".join((*VALUES, *more)))
    await site.helm(*command, "--wait", "--timeout", f"{DEADLINE_S:.0f}s")


async def stored_policy(site: Installed) -> Any:
    """Return the spec of the policy, once a picker says that it routes."""
    found = await site.wait_policy("routing", "Programmed", status="True")
    return found["spec"]


async def at_rest(load: SteadyLoad, name: str) -> Phase:
    with load.phase(name) as phase:
        await load.answers(25 * IN_FLIGHT)
    return phase


async def test_to_this_release_and_back_loses_no_request_policy_or_hits(
    own_cluster: ControlPlane, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = last_release(tmp_path / "last")
    old_charts, older = old / "deploy" / "helm", f"image.repository={OLD_IMAGE}"
    site = site_on(own_cluster)
    servers = {"engine": "simulated", "replicas": 3, "profile__model": MODEL, "longestAnswerSeconds": 60}
    with running_node(own_cluster, images=images(old), folder=tmp_path / "node") as node:
        await site.upgrade("servers", str(old_charts / "model-server"), **servers)
        await install(site, old_charts / "prefix-gateway", older)
        await site.apply(await site.policy("routing", **SPEC))
        spec = await stored_policy(site)
        url = await site.url()
        connector = node.connector(force_close=True, limit=0)
        async with steady_load(
            connector, url, capsys=capsys, in_flight=IN_FLIGHT, at_least=IN_FLIGHT // 2, phase="warming"
        ) as load:
            phases = [await at_rest(load, f"{RELEASE} at rest")]
            crds = ("apply", "--server-side", "--force-conflicts", "-f", CHARTS.parent / "crds")
            await site.kubectl(*crds)
            today, last = ("image.repository=prefix-gateway/picker",), (older, "crd.install=never")
            for name, charts, values in (
                ("to this release", CHARTS, today),
                (f"back to {RELEASE}", old_charts, last),
                ("forward again", CHARTS, today),
            ):
                with load.phase(f"{name}: both at once"):
                    await install(site, charts / "prefix-gateway", *values)
                phases.append(await at_rest(load, f"{name}, at rest"))
                assert await stored_policy(site) == spec
            with load.phase("servers to this release's chart"):
                await site.upgrade("servers", "model-server", **servers)
                await load.answers(IN_FLIGHT)
    assert min(phase.hit_ratio for phase in phases[1:]) > phases[0].hit_ratio - 0.05
