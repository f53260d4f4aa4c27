"""The load test's Job: it is off by default, it loads its own release, and the generator accepts its
arguments.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.charts.rendering import GATEWAY, REPOSITORY, Helm, containers, of_kind
from tests.harness.ports import free_port

pytest_plugins = ["tests.charts.fixtures"]
pytestmark = pytest.mark.cluster

ON = {"enabled": True, "image": {"repository": "registry.example/load"}}


def job(helm: Helm, **values: Any) -> dict[str, Any]:
    return of_kind(helm.render(GATEWAY, values), "Job")


def container(made: dict[str, Any]) -> dict[str, Any]:
    (found,) = containers(made["spec"]["template"]["spec"])
    return found


def test_there_is_no_load_job_unless_the_values_ask_for_one(helm: Helm) -> None:
    assert not [each for each in helm.render(GATEWAY) if each["kind"] == "Job"]


def test_job_loads_the_releases_own_service_and_is_never_one_of_its_pods(helm: Helm) -> None:
    objects = helm.render(GATEWAY, {"loadTest": ON})
    made = of_kind(objects, "Job")
    service = of_kind(objects, "Service", "gateway-prefix-gateway")
    args = container(made)["args"]
    assert (
        args[args.index("--host") + 1]
        == f"http://gateway-prefix-gateway:{service['spec']['ports'][0]['port']}"
    )
    labels = made["spec"]["template"]["metadata"]["labels"]
    assert not service["spec"]["selector"].items() <= labels.items()
    tls = container(job(helm, loadTest=ON, tls={"secretName": "certificate"}))["args"]
    assert "https://gateway-prefix-gateway:443" in tls


def test_the_generator_accepts_the_jobs_arguments(helm: Helm) -> None:
    host = f"http://127.0.0.1:{free_port()}"
    load = {**ON, "host": host, "scenario": "shared", "args": ["--users", "9", "--prefixes", "4"]}
    made = container(job(helm, loadTest=load))
    assert made["command"] == ["python", "-m", "bench.load"]
    ended = subprocess.run(
        [sys.executable, "-m", "bench.load", *made["args"]],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, f"Nothing answers at {host}" in ended.stderr) == (3, True), ended.stderr
