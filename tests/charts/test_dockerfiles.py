"""The Dockerfiles and deploy/compose, without an image: pinned bases, packages with hashes, commands."""

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml

from epp.serve.cli import command_line
from model_server import serve_flags
from model_server.cli import command_line as of_model_server
from tests.charts.rendering import GATEWAY, MODEL_SERVER, REPOSITORY
from tests.image_env import dockerfiles
from tests.image_env.dockerfiles import FOLDER, read

DOCKERFILES = sorted(FOLDER.glob("*.Dockerfile"))
OPTIONAL = {
    "model_server",  # the simulator; `epp replay` reports that it is missing
    "jinja2",
    "tokenizers",
    "torch",
    "transformers",
    "safetensors",
    "gguf",
    "accelerate",
    "numpy",
    "vllm",
}
"""Runners and plug-ins that are not for the image. The model server starts without them."""
EACH = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
PICKER, SERVER = FOLDER / "picker.Dockerfile", FOLDER / "model-server.Dockerfile"


def imports_of(file: Path) -> Iterator[str]:
    """Return the absolute imports of a module, wherever they stand in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


@EACH
def test_bases_are_pinned_and_processes_are_nobody(path: Path) -> None:
    stages = read(path)
    build, run = (
        re.fullmatch(r"docker\.io/library/python:(3\.11\.\d+)-(\w+(?:-\w+)?)", s.image) for s in stages
    )
    assert build
    assert run
    assert build[1] == run[1], "both stages have the same Python"
    assert (build[2], run[2]) == ("bookworm", "slim-bookworm"), (
        "both stages have the same C library, and only the first has a compiler"
    )
    last = stages[-1]
    (user,) = last.all("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "runAsNonRoot needs a number and cannot judge a name"
    after = [instruction for instruction, _ in last.steps][[i for i, _ in last.steps].index("USER") :]
    assert not {"RUN", "COPY"} & set(after), "the user that runs the program wrote none of its files"
    assert last.all("ENTRYPOINT")[0].startswith("["), "no shell between the kubelet's signals and the program"


@EACH
def test_packages_come_from_hashes_that_the_tests_run_with(path: Path) -> None:
    installs = [rest for stage in read(path) for rest in stage.all("RUN") if "pip install" in rest]
    assert installs
    locked = [name for rest in installs for name in re.findall(r"--require-hashes.* -r (\S+)", rest)]
    assert locked
    dev = (REPOSITORY / "requirements/dev.txt").read_text()
    for name in locked:
        for pin in re.findall(r"^\S+==\S+", (REPOSITORY / name).read_text(), re.MULTILINE):
            assert pin in dev, f"{pin}: run `make lock`"
    for command in installs:
        assert "--require-hashes" in command or "--no-deps --no-build-isolation" in command


def test_the_ignore_file_hides_large_and_private_files() -> None:
    for hidden in (".git/config", ".venv/bin/python", "epp/__pycache__/app.pyc", "docs/goals.md"):
        assert dockerfiles.ignored(hidden), hidden


@pytest.mark.parametrize(
    ("path", "chart"), [(PICKER, GATEWAY), (SERVER, MODEL_SERVER)], ids=["picker", "server"]
)
def test_the_command_of_the_chart_is_in_the_image(path: Path, chart: Path) -> None:
    templates = "".join(each.read_text() for each in (chart / "templates").glob("*.*"))
    (entry,) = re.findall(r'\["(\S+)"\]', read(path)[-1].all("ENTRYPOINT")[0])
    assert f"command: [{entry}, serve]" in templates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "package", "lacks"),
    [(PICKER, "epp", "torch"), (SERVER, "model_server", "kubernetes")],
    ids=["picker", "server"],
)
def test_every_package_that_the_code_imports_is_installed(path: Path, package: str, lacks: str) -> None:
    distributions = packages_distributions()
    imported = {
        name.partition(".")[0] for file in (REPOSITORY / package).rglob("*.py") for name in imports_of(file)
    }
    third_party = imported - sys.stdlib_module_names - {package} - OPTIONAL
    installs = [rest for rest in read(path)[0].all("RUN") if "--target" not in rest]
    (lock,) = re.findall(r"-r (\S+)", " ".join(installs))
    locked = set(re.findall(r"^([\w-]+)==", (REPOSITORY / lock).read_text(), re.MULTILINE))
    for name in third_party:
        assert {each.lower().replace("_", "-") for each in distributions[name]} & locked, (
            f"{name} is not in {lock}"
        )
    assert lacks not in locked, "a smaller image"


COMPOSE = Path(__file__).parents[2] / "deploy" / "compose"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    return found


def test_the_gateway_runs_before_every_server(services: dict[str, Any]) -> None:
    program, *command = services["gateway"]["command"]
    assert (program, command[0]) == ("epp", "up")
    asked = command_line().parse_args(command)
    assert (str(asked.port), str(asked.page)) == ("0.0.0.0:8080", "0.0.0.0:9090")
    assert asked.server == ["server-a:8000", "server-b:8000"]
    assert set(services["gateway"]["depends_on"]) == {"server-a", "server-b"}
    for name in ("server-a", "server-b"):
        program, *command = services[name]["command"]
        assert program == "model-server"
        assert serve_flags.settings(of_model_server().parse_args(command)).port == 8000


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
        assert (COMPOSE / path).exists(), path


def test_prometheus_gives_its_targets_the_labels_of_the_dashboard() -> None:
    jobs = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())["scrape_configs"]
    static = [one for job in jobs for one in job["static_configs"]]
    assert [one["targets"] for one in static] == [["127.0.0.1:9090"], ["127.0.0.1:9901"]]
    assert all(one["labels"].keys() == {"namespace", "service", "pod"} for one in static)
