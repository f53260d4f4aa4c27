"""Rules for every test. The folder of a test decides in which part it runs and which fixtures it has, and
Hypothesis fails no test for being slow.
"""

import gc
import importlib.util
import logging
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.suite import PLACES, PROCESS_FOLDERS

CLUSTER = ("tests.cluster_env.fixtures",)
VLLM = ("tests.vllm_env.fixtures",)
GATEWAY = ("tests.harness.fixtures", "tests.harness.http_model_server")
FIXTURES = {
    "charts": ("tests.charts.fixtures", "tests.harness.fixtures", *CLUSTER),
    "cluster": CLUSTER,
    "contract": VLLM,
    "integration": (*GATEWAY, *VLLM),
}
"""Modules of fixtures by the folder of tests that may use them."""


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> None:
    """Register the fixtures of a folder with its first file. Other folders need not import them."""
    for name in FIXTURES.get(file_path.parent.name, ()):
        parent.config.pluginmanager.import_plugin(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Output that is not UTF-8, which some tests make on purpose, would end a run on several cores, because
    reports travel between processes.
    """
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(PROCESS_FOLDERS):
            item.add_marker(pytest.mark.processes)
        for marker, folders in PLACES.items():
            if item.get_closest_marker(marker) and not item.nodeid.startswith((*folders, *PROCESS_FOLDERS)):
                raise pytest.UsageError(f"{item.nodeid}: the marker {marker} is for {', '.join(folders)}")
        if item.get_closest_marker("core") and any(map(item.get_closest_marker, ("vllm", "cluster"))):
            raise pytest.UsageError(f"{item.nodeid}: a test of the core needs neither vLLM nor a cluster")


def pytest_collection_finish() -> None:
    """Garbage collections, which many tests cause, then need not look at the modules of all tests."""
    gc.collect()
    gc.freeze()


if importlib.util.find_spec("hypothesis") is not None:  # the engine's own environment may go without it
    from hypothesis import HealthCheck, settings

    # By default an example over 0.2 s, or ten that took over 1 s to draw, fail a test: a busy machine can be
    # that slow.
    settings.register_profile(
        "any machine", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any machine")


@pytest.fixture
def restored_root() -> Iterator[None]:
    """Give the root logger its handlers and its level back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for made in [h for h in root.handlers if h not in handlers]:
        made.close()
    root.handlers[:] = handlers
    root.setLevel(level)
