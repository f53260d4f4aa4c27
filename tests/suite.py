"""Run all tests in parts, and print a table of times at the end: `python -m tests.suite`.

`make test` runs the parts of the group `test`, which need no environment but the virtual one. `make test-all`
runs the group `rest` too. Meanwhile the command builds the environments of that group. The fast part comes
first and has all cores. Then three parts run at a time if there are two cores, because most tests wait for
processes and one part keeps less than one core busy. Each line of output begins with the name of its part.
A test that fails runs once more, in a fresh process with servers of its own. A test counts as failed if it
fails twice. A test that passes the second time is named in the table, because a test that needs a second run
has a fault that must be repaired. The status is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

_FOLDER = Path("build/tests")
_PYTHON = sys.executable
_AT_ONCE = 3
_LONG_FILE_S = 60.0
"""Files that take longer are named below the table."""
_FAILED = 1
"""pytest's status when tests failed. Any other status except 0 means that pytest could not run the tests."""
_NO_TESTS = 5
"""pytest's status when it found no test. A part without tests fails, because it proves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    about: str
    command: Sequence[str]
    needs: str = ""
    """The make targets that build the environments of this part."""
    alone: bool = False
    """True: the part runs before the others, because it uses all cores itself."""


PROTOCOL = ("tests/conformance", "tests/fuzz")
"""All tests of these folders start processes, as those of tests/integration do (tests/conftest.py)."""
_IGNORED = tuple(f"--ignore={folder}" for folder in PROTOCOL)
CORE_FOLDERS = ("tests/integration", "tests/unit/serve/envoy")
"""The tests of the core are here, so that pytest need not import all tests to find them."""
_SINGLE = "not envoy and not vllm and not cluster and not processes"
_PYTEST = (_PYTHON, "-m", "pytest")

PARTS = (
    Part(
        name="fast",
        about="no processes of their own; on all cores",
        command=(
            *(*_PYTEST, "-n", "auto", "--dist", "loadfile", "-m", f"{_SINGLE} and not slow and not core"),
            *("--ignore=tests/integration", *_IGNORED),
        ),
        alone=True,
    ),
    Part(
        name="slow",
        about="no processes of their own, but seconds each; on all cores",
        command=(
            *(*_PYTEST, "-n", "auto", "--dist", "loadfile", "-m", f"{_SINGLE} and slow and not core"),
            *("--ignore=tests/integration", *_IGNORED),
        ),
        alone=True,
    ),
    Part(
        name="core",
        about="the gateway's promises on real Envoy, Redis and the model server",
        command=(*_PYTEST, *CORE_FOLDERS, "-m", "core"),
    ),
    Part(
        name="integration",
        about="real Envoy, Redis and Valkey",
        command=(
            *(*_PYTEST, "-m", "(envoy or processes) and not vllm and not cluster and not core"),
            *_IGNORED,
        ),
        needs="engine-env",
    ),
    Part(
        name="cluster",
        about="a real Kubernetes control plane",
        command=(*_PYTEST, "-m", "cluster and not envoy and not vllm and not core"),
        needs="cluster-env image-env",
    ),
    Part(
        name="pods",
        about="the charts' pods on a real Kubernetes control plane, with Envoy",
        command=(*_PYTEST, "-m", "cluster and envoy and not vllm and not core"),
        needs="cluster-env image-env",
    ),
    Part(
        name="vllm",
        about="real vLLM",
        command=(*_PYTEST, "-m", "vllm and not core"),
        needs="vllm-env engine-env",
    ),
    Part(
        name="protocol",
        about="the endpoint picker protocol row by row, and generated input",
        command=(*_PYTEST, *PROTOCOL, "-m", "not cluster and not vllm and not core"),
    ),
    Part(
        name="engine",
        about="the model server's real models, on torch",
        command=(_PYTHON, "-m", "tests.engine_env", "run", "pytest", "tests/engine"),
        needs="engine-env",
    ),
)
"""The part with all cores comes first, and then the longest parts, so that parts that run at a time end
together.
"""
GROUPS = {
    "test": ("fast", "core", "slow"),
    "rest": ("integration", "cluster", "pods", "vllm", "protocol", "engine"),
    "all": tuple(part.name for part in PARTS),
}
"""`make test`, what `make test-all` adds to it, and both together. Only the second needs environments."""


@dataclass(slots=True)
class Outcome:
    """The result of one part."""

    part: Part
    status: int = 0
    seconds: float = 0.0
    tests: int = 0
    skipped: int = 0
    second_run: list[str] = field(default_factory=list)
    """Tests that failed and then passed."""
    failed: list[str] = field(default_factory=list)
    files_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each file's tests, by the name of its module."""


@dataclass(frozen=True, slots=True)
class Report:
    """The content of the XML report that pytest writes about one run."""

    tests: int = 0
    skipped: int = 0
    failed: Sequence[str] = ()
    files_s: Mapping[str, float] = field(default_factory=dict)


def run_part(part: Part, *, built: Future[int] | None) -> Outcome:
    outcome, started = Outcome(part), time.monotonic()
    print(f"== {part.name}: {part.about}", flush=True)
    outcome.status = built.result() if built is not None else 0
    if outcome.status:
        print(f"== {part.name}: `make {part.needs}` failed; its message is above", flush=True)
        return outcome
    outcome.status, first = _pytest(part, "first", "--cache-clear")
    outcome.tests, outcome.skipped, outcome.files_s = first.tests, first.skipped, first.files_s
    outcome.failed = failed = list(first.failed)
    if outcome.status == _FAILED and failed:
        print(
            f"== {part.name}: failed tests run once more; a test that fails twice counts as failed",
            flush=True,
        )
        outcome.status, second = _pytest(part, "second", "--last-failed", "--last-failed-no-failures", "none")
        outcome.failed = list(second.failed)
        outcome.second_run = sorted(set(failed) - set(outcome.failed))
    if not outcome.status and not outcome.tests:
        outcome.status = _NO_TESTS
    outcome.seconds = time.monotonic() - started
    return outcome


def _pytest(part: Part, run: str, *arguments: str) -> tuple[int, Report]:
    report = _FOLDER / f"{part.name}-{run}.xml"
    report.unlink(missing_ok=True)
    # Some tests record properties. The older family of reports may hold them, and in the newer family they
    # cause a warning.
    written = (f"--junit-xml={report}", "-o", "junit_family=xunit1")
    kept = (
        "-o",
        f"cache_dir={(_FOLDER / part.name).resolve()}",
    )  # the list of failed tests, one for each part, since two parts run at a time
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
    cases = ET.parse(path).getroot().iter("testcase")
    tests, skipped, failed = 0, 0, []
    files_s: dict[str, float] = defaultdict(float)
    for case in cases:
        tests += 1
        # A class is a part of its module's name here.
        module = ".".join(word for word in (case.get("classname") or "").split(".") if word[:1].islower())
        files_s[module] += float(case.get("time") or 0.0)
        skipped += case.find("skipped") is not None
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return Report(tests, skipped, failed, files_s)


def table(outcomes: Sequence[Outcome], *, seconds: float) -> str:
    """Return one line for each part and one for the whole run of `seconds`. Below them are the tests that
    failed once or twice, and the files that took long.
    """
    lines = [f"{'part':<12} {'tests':>6} {'skipped':>8} {'minutes':>8}  result"]
    for o in outcomes:
        result = "passed" if not o.status else "FAILED"
        lines.append(f"{o.part.name:<12} {o.tests:>6} {o.skipped:>8} {o.seconds / 60:>8.1f}  {result}")
    tests, skipped = sum(o.tests for o in outcomes), sum(o.skipped for o in outcomes)
    lines.append(f"{'all':<12} {tests:>6} {skipped:>8} {seconds / 60:>8.1f}")
    again = [name for o in outcomes for name in o.second_run]
    if again:
        lines.append(f"{len(again)} failed at first and passed when run again; each has a fault to repair:")
    lines += [f"needed a second run: {name}" for name in again]
    lines += [f"failed: {name}" for o in outcomes for name in o.failed]
    files = sorted(((s, name) for o in outcomes for name, s in o.files_s.items()), reverse=True)
    lines += [f"{s / 60:.1f} minutes: {name}" for s, name in files if s > _LONG_FILE_S]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suite", description=__doc__.splitlines()[0])
    known = (*GROUPS["all"], *GROUPS)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(known)}; all by default")
    parser.add_argument(
        "--only", nargs=argparse.REMAINDER, metavar="PART", help="run one part; more words go to its pytest"
    )
    options = parser.parse_args()
    if options.only:
        (part,) = (part for part in PARTS if part.name == options.only[0])
        return subprocess.run([*part.command, *options.only[1:]], check=False).returncode
    asked = options.parts or ["all"]
    if unknown := set(asked) - set(known):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(known)}")
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
        first = [run_part(part, built=builds.get(part.name)) for part in parts if part.alone]
        others = [part for part in parts if not part.alone]
        return first + list(runner.map(lambda part: run_part(part, built=builds.get(part.name)), others))


def _make(targets: str) -> int:
    """Build. A download may fail for a reason that has passed a moment later, so a failed build is tried once
    more.
    """
    command = ["make", "--no-print-directory", *targets.split()]
    return _run(command, name="build") and _run(command, name="build")


if __name__ == "__main__":
    sys.exit(main())
