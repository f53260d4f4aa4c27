"""The containers of deploy/compose: the programs take their commands, and the files are here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from epp.serve.cli import command_line
from model_server.cli import command_line as of_model_server

FOLDER = Path(__file__).parents[2] / "deploy" / "compose"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    return found


def test_the_gateway_runs_before_every_server(services: dict[str, Any]) -> None:
    program, *command = services["gateway"]["command"]
    assert program == "epp"
    asked = command_line().parse_args(command)
    assert (asked.command, str(asked.port), str(asked.page)) == ("up", "0.0.0.0:8080", "0.0.0.0:9090")
    assert asked.server == ["server-a:8000", "server-b:8000"]
    assert set(services["gateway"]["depends_on"]) == {"server-a", "server-b"}
    for name in ("server-a", "server-b"):
        program, *command = services[name]["command"]
        assert program == "model-server"
        assert of_model_server().parse_args(command).port == 8000


def test_each_mounted_or_copied_file_is_in_the_repository(services: dict[str, Any]) -> None:
    mounted = [each.split(":")[0] for one in services.values() for each in one.get("volumes", [])]
    assert len(mounted) == 3
    build = services["gateway"]["build"]
    copied = [
        word
        for line in build["dockerfile_inline"].splitlines()
        if line.startswith("COPY")
        for word in line.split()[1:-1]
    ]
    for path in (*mounted, *(f"{build['context']}/{each}" for each in copied)):
        assert (FOLDER / path).exists(), path


def test_prometheus_gives_its_targets_the_labels_of_the_dashboard() -> None:
    jobs = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    static = [one for job in jobs for one in job["static_configs"]]
    assert [one["targets"] for one in static] == [["127.0.0.1:9090"], ["127.0.0.1:9901"]]
    assert all(one["labels"].keys() == {"namespace", "service", "pod"} for one in static)
