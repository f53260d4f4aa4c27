"""h2spec, a conformance tester for HTTP/2 servers, built once from its Go module and cached by version
outside the checkout.
"""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.harness.cached_builds import CachedBuild, cache_folder, run
from tests.harness.prepared import CLUSTER, lacking

VERSION: Final = "v2.2.1+incompatible"
_MODULE: Final = "github.com/summerwind/h2spec/cmd/h2spec"


def h2spec_program() -> Path:
    """Return the program's path. Build the program first if it is not cached. Skip the test if no Go is
    installed.
    """
    found = CachedBuild(cache_folder() / f"h2spec-{VERSION}")
    if not found.ready and shutil.which("go") is None:
        lacking("h2spec is built with Go, which is not installed", required_by=CLUSTER)

    def fill(folder: Path) -> None:
        run("go", "install", f"{_MODULE}@{VERSION}", env={"GOBIN": str(folder), "CGO_ENABLED": "0"})

    return found.build("h2spec", fill, progress=print).folder / "h2spec"


@dataclass(frozen=True, slots=True)
class SpecCase:
    """One case of a report: its section, its text, and the reason why it failed. The reason is empty if the
    case passed.
    """

    section: str
    text: str
    failure: str


def read_report(path: Path) -> list[SpecCase]:
    """Read h2spec's JUnit file."""
    return [
        SpecCase(case.get("package", ""), case.get("classname", ""), _failure(case))
        for case in ET.parse(path).getroot().iter("testcase")
    ]


def _failure(case: ET.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            return found.text or kind
    return ""
