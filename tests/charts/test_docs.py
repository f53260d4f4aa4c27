"""The commands of docs/kubernetes.md and docs/upgrade.md run, or name things that exist."""

import os
import re
import shlex
import subprocess
from typing import Final

import pytest

from tests.charts import addon_crds
from tests.charts.rendering import GATEWAY, REPOSITORY, VALUE_SETS, Helm, containers, pod_specs
from tests.cluster_env.control_plane import ControlPlane
from tests.cluster_env.preparing import await_established
from tests.unit.docs.pages import PAGES

pytestmark = pytest.mark.cluster

PAGE: Final = "".join((REPOSITORY / "docs" / name).read_text() for name in ("kubernetes.md", "upgrade.md"))
BLOCKS: Final = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
NEEDS_PODS: Final = {"logs", "port-forward", "rollout"}


def in_tables() -> list[str]:
    """Return the commands in the table of symptoms."""
    rows = [row for row in PAGE.split("## Troubleshooting")[1].splitlines() if row.startswith("|")]
    last_cells = [row.rstrip("| ").rpartition("|")[2] for row in rows]
    return [command for cell in last_cells for command in re.findall(r"`((?:kubectl|helm) [^`]+)`", cell)]


def run(plane: ControlPlane, script: str) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PATH": f"{plane.tools.helm.parent}:{os.environ['PATH']}",
            "KUBECONFIG": str(plane.kubeconfig),
            "KUBECACHEDIR": str(plane.folder / "kubectl-cache"),
            "HELM_CACHE_HOME": str(plane.folder / "helm-cache"),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_commands_of_the_page_run_in_their_order(own_cluster: ControlPlane) -> None:
    plane = own_cluster
    for crds in (plane.tools.crds, addon_crds.fetch(progress=print)):
        plane.kubectl("apply", "--server-side", "-f", crds)
        await_established(plane, "-f", crds)
    scripts = [text for language, text in BLOCKS if language == "sh"]
    assert len(scripts) >= 5
    for script in scripts:
        if "uninstall" in script:  # the objects that these commands show exist until then
            for command in in_tables():
                if not NEEDS_PODS & set(command.split()):
                    run(plane, command)
        output = run(plane, script)
        if "get prefixroutingpolicy" in script:
            assert "chat" in output
    left = plane.kubectl(
        "get", "deployments,services,secrets,configmaps,roles", "-n", "llm", "-o", "name"
    ).split()
    assert left == ["configmap/kube-root-ca.crt"]
    assert plane.get("prefixroutingpolicy", "chat", "-n", "llm")


def test_commands_that_need_pods_name_what_the_chart_makes(helm: Helm) -> None:
    objects = [o for each in VALUE_SETS if each.name.endswith("default") for o in helm.render_set(each)]
    made = {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in objects}
    inside = {c["name"] for _, spec in pod_specs(objects) for c in containers(spec)}
    texts = [line for language, text in BLOCKS if language == "console" for line in text.splitlines()]
    named = [shlex.split(line) for line in [*texts, *in_tables()] if NEEDS_PODS & set(line.split())]
    assert len(named) >= 5
    for words in named:
        assert {word for word in words if word.startswith(("deployment/", "service/"))} <= made, words
        if "-c" in words:
            assert words[words.index("-c") + 1] in inside, words


def test_every_helm_command_of_a_page_renders(helm: Helm) -> None:
    texts = [text.replace("\\\n", " ") for page in PAGES for _, text in page.blocks]
    lines = [line.replace("$URL", "http://10.0.0.9") for text in texts for line in text.splitlines()]
    commands = [shlex.split(line) for line in lines if re.match("helm (install|upgrade|template) ", line)]
    assert len(commands) >= 10
    for _, _, release, chart, *flags in commands:
        left_out = ("--reset-then-reuse-values", "-f", "values.yaml")
        helm.run("template", release, REPOSITORY / chart, *(flag for flag in flags if flag not in left_out))


def test_the_page_names_the_alerts_as_they_are() -> None:
    alerts = (GATEWAY / "files" / "alerts.yaml").read_text()
    for name in re.findall(r"\bPrefixGateway[A-Z]\w+", PAGE):
        assert f"alert: {name}\n" in alerts, name
