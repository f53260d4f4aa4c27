"""Run all tests in parts, and print a table of times at the end: `python -m tests.suite`.

`make test` runs the group `test`, which needs no environment but the virtual one. `make test-rest`
runs the group `rest`. Meanwhile the command builds the environments of that group. Three parts run at a time
if there are two cores, because most tests wait for processes and one part keeps less than one core busy. Each
line of output begins with the name of its part. A test that fails runs once more, in a fresh process with
servers of its own. A test counts as failed if it fails twice. A test that passes the second time is named in
the table, because a test that needs a second run has a fault that must be repaired. The status is 1 if a part
failed.
"""

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

_FOLDER = Path("build/tests")
_AT_ONCE = 3
_FAILED = 1
"""pytest's status when tests failed. Any other status except 0 means that pytest could not run the tests."""
_NO_TESTS = 5
"""pytest's status when it found no test. A part without tests fails, because it proves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    about: str
    folders: Sequence[str] = ()
    """The folders of its tests, so that pytest need not import all tests to find them. Empty: all."""
    marks: str
    """The markers of its tests, as an expression of pytest."""
    options: Sequence[str] = ()
    needs: str = ""
    """The make targets that build the environments of this part."""
    pytest: Sequence[str] = (sys.executable, "-m", "pytest")

    @property
    def command(self) -> Sequence[str]:
        return (*self.pytest, *self.folders, "-m", self.marks, *self.options)


PROCESS_FOLDERS = ("tests/integration", "tests/conformance", "tests/fuzz")
"""All tests of these folders have the marker `processes` (tests/conftest.py)."""
CORE_FOLDERS = ("tests/integration", "tests/unit/serve/envoy")
PLACES = {
    "core": CORE_FOLDERS,
    "vllm": ("tests/integration", "tests/contract"),
    "cluster": ("tests/charts", "tests/cluster"),
    "envoy": (*CORE_FOLDERS, "tests/charts", "tests/cluster", "tests/dialects", "bench/soak"),
    "processes": (*PROCESS_FOLDERS, "tests/charts", "tests/property"),
}
"""The folders in which a test may have each marker."""
_UNITS = "not envoy and not vllm and not cluster and not processes and not core"
_ALL_CORES = ("-n", "auto", "--dist", "loadfile", *(f"--ignore={folder}" for folder in PROCESS_FOLDERS))

FAST = Part(
    name="fast",
    about="no processes of their own, and quick; on all cores",
    marks=f"{_UNITS} and not slow",
    options=_ALL_CORES,
)
"""`make test-fast ARGS=...`, with further arguments for pytest. These tests are also in the part `units`."""
PARTS = (
    Part(
        name="units",
        about="no processes of their own; on all cores",
        marks=_UNITS,
        options=_ALL_CORES,
    ),
    Part(
        name="core",
        about="the gateway's promises on real Envoy, Redis and the model server",
        folders=CORE_FOLDERS,
        marks="core",
    ),
    Part(
        name="integration",
        about="real Envoy, Redis and Valkey",
        folders=sorted({*PLACES["envoy"], *PLACES["processes"]} - {"tests/conformance", "tests/fuzz"}),
        marks="(envoy or processes) and not vllm and not cluster and not core",
        needs="engine-env clients-env rivals-env",
    ),
    Part(
        name="cluster",
        about="a real Kubernetes control plane",
        folders=PLACES["cluster"],
        marks="cluster and not envoy",
        needs="cluster-env image-env",
    ),
    Part(
        name="pods",
        about="the charts' pods on a real Kubernetes control plane, with Envoy",
        folders=PLACES["cluster"],
        marks="cluster and envoy",
        needs="cluster-env image-env",
    ),
    Part(
        name="vllm",
        about="real vLLM",
        folders=PLACES["vllm"],
        marks="vllm",
        needs="vllm-env engine-env clients-env",
    ),
    Part(
        name="protocol",
        about="the endpoint picker protocol row by row, and generated input",
        folders=("tests/conformance", "tests/fuzz"),
        marks="processes",
    ),
    Part(
        name="engine",
        about="the model server's real models, on torch",
        folders=("tests/engine",),
        marks="not core",
        needs="engine-env",
        pytest=(sys.executable, "-m", "tests.environments", "engine", "run", "pytest"),
    ),
)
"""The longest parts come first, so that parts that run at a time end together."""
GROUPS = {"test": ("units", "core"), "rest": tuple(part.name for part in PARTS[2:])}
"""`make test`, and what `make test-all` adds to it. Only the second needs environments."""


@dataclass(frozen=True, slots=True)
class Report:
    """The content of the XML report that pytest writes about one run."""

    tests: int = 0
    skipped: int = 0
    failed: Sequence[str] = ()


@dataclass(slots=True)
class Outcome:
    """The result of one part."""

    part: Part
    status: int = 0
    seconds: float = 0.0
    first: Report = field(default_factory=Report)
    failed: Sequence[str] = ()
    """Tests that failed twice."""

    @property
    def second_run(self) -> list[str]:
        """Return the tests that failed and then passed."""
        return sorted(set(self.first.failed) - set(self.failed))


def run_part(part: Part, *, built: Future[int] | None) -> Outcome:
    outcome, started = Outcome(part), time.monotonic()
    print(f"== {part.name}: {part.about}", flush=True)
    outcome.status = built.result() if built is not None else 0
    if outcome.status:
        print(f"== {part.name}: `make {part.needs}` failed; its message is above", flush=True)
        return outcome
    outcome.status, outcome.first = _pytest(part, "first", "--cache-clear")
    outcome.failed = outcome.first.failed
    if outcome.status == _FAILED and outcome.failed:
        print(f"== {part.name}: failed tests run once more; a test that fails twice has failed", flush=True)
        outcome.status, second = _pytest(part, "second", "--last-failed", "--last-failed-no-failures", "none")
        outcome.failed = second.failed
    if not outcome.status and not outcome.first.tests:
        outcome.status = _NO_TESTS
    outcome.seconds = time.monotonic() - started
    return outcome


def _pytest(part: Part, run: str, *arguments: str) -> tuple[int, Report]:
    report = _FOLDER / f"{part.name}-{run}.xml"
    report.unlink(missing_ok=True)
    # Some tests record properties. The older family of reports may hold them, and in the newer family they
    # cause a warning.
    written = (f"--junit-xml={report}", "-o", "junit_family=xunit1")
    # The list of failed tests, one for each part, since several parts run at a time.
    kept = ("-o", f"cache_dir={(_FOLDER / part.name).resolve()}")
    status = _run([*part.command, *written, *kept, *arguments], name=part.name)
    return status, read_report(report) if report.exists() else Report()


def _run(command: Sequence[str], *, name: str) -> int:
    """Run a command to its end. Print its output line by line as it comes, with a name before each line.
    Return the command's status.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{name:<11} | {line}", end="", flush=True)
    return process.returncode


def read_report(path: Path) -> Report:
    cases = list(ET.parse(path).getroot().iter("testcase"))
    return Report(
        tests=len(cases),
        skipped=sum(case.find("skipped") is not None for case in cases),
        failed=[
            f"{case.get('classname')}::{case.get('name')}"
            for case in cases
            if case.find("failure") is not None or case.find("error") is not None
        ],
    )


def table(outcomes: Sequence[Outcome], *, seconds: float) -> str:
    """Return one line for each part and one for the whole run of `seconds`. Below them are the tests that
    failed once or twice.
    """
    lines = [f"{'part':<12} {'tests':>6} {'skipped':>8} {'minutes':>8}  result"]
    for o in outcomes:
        result = "passed" if not o.status else "FAILED"
        lines.append(
            f"{o.part.name:<12} {o.first.tests:>6} {o.first.skipped:>8} {o.seconds / 60:>8.1f}  {result}"
        )
    tests, skipped = sum(o.first.tests for o in outcomes), sum(o.first.skipped for o in outcomes)
    lines.append(f"{'all':<12} {tests:>6} {skipped:>8} {seconds / 60:>8.1f}")
    lines += [f"needed a second run, a fault to repair: {name}" for o in outcomes for name in o.second_run]
    lines += [f"failed: {name}" for o in outcomes for name in o.failed]
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == [FAST.name]:
        return subprocess.run([*FAST.command, *sys.argv[2:]], check=False).returncode
    parser = argparse.ArgumentParser(prog="python -m tests.suite", description=__doc__.splitlines()[0])
    known = (*(part.name for part in PARTS), *GROUPS)
    parser.add_argument("parts", nargs="+", choices=known, help="parts or groups of parts")
    asked = parser.parse_args().parts
    chosen = {name for each in asked for name in GROUPS.get(each, (each,))}
    parts = [part for part in PARTS if part.name in chosen]
    _FOLDER.mkdir(parents=True, exist_ok=True)
    # A test whose environment is missing fails instead of being skipped.
    os.environ.update(PREFIX_GATEWAY_REQUIRE_VLLM="1", PREFIX_GATEWAY_REQUIRE_CLUSTER="1")
    started = time.monotonic()
    outcomes = run_all(parts)
    print(f"\n{table(outcomes, seconds=time.monotonic() - started)}", flush=True)
    return 1 if any(o.status for o in outcomes) else 0


def run_all(parts: Sequence[Part]) -> list[Outcome]:
    at_once = _AT_ONCE if (os.cpu_count() or 1) > 1 else 1
    # Builds run one at a time, beside tests of parts that need no build: on a new machine the control plane
    # compiles for minutes.
    with ThreadPoolExecutor(max_workers=1) as builder, ThreadPoolExecutor(max_workers=at_once) as runner:
        builds = {part.name: builder.submit(_make, part.needs) for part in parts if part.needs}
        return list(runner.map(lambda part: run_part(part, built=builds.get(part.name)), parts))


def _make(targets: str) -> int:
    """Build. A download may fail for a reason that has passed a moment later, so a failed build is tried once
    more.
    """
    command = ["make", "--no-print-directory", *targets.split()]
    return _run(command, name="build") and _run(command, name="build")


if __name__ == "__main__":
    sys.exit(main())
