"""h2spec's generic, http2 and hpack groups check our HTTP/2 on a running server."""

import asyncio
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Final

import pytest

from tests.harness.cached_builds import CachedBuild, cache_folder, run
from tests.harness.prepared import CLUSTER, lacking
from tests.integration.test_extproc_server import serving_picker

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


def read_report(path: Path) -> list[tuple[str, str]]:
    """Read h2spec's JUnit file. Return the text of each case, and why it failed: empty if it passed."""
    return [(case.get("classname", ""), _failure(case)) for case in ET.parse(path).getroot().iter("testcase")]


def _failure(case: ET.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            return found.text or kind
    return ""


LEFT_OUT = {
    "Sends HEADERS frame that depend on itself": "RFC 9113 has no dependencies of streams any more",
    "Sends PRIORITY frame that depend on itself": "RFC 9113 has no dependencies of streams any more",
    "Sends a dynamic table size update larger than the value of SETTINGS_HEADER_TABLE_SIZE": (
        "older clients ignore the setting and use a table of the usual 4,096 bytes, which costs us nothing"
    ),
}
"""Cases that fail on purpose, each with its reason."""


@pytest.mark.slow  # building h2spec takes twenty seconds the first time
async def test_h2spec_passes_except_for_the_cases_that_fail_on_purpose(tmp_path: Path) -> None:
    program, report = h2spec_program(), tmp_path / "report.xml"
    async with serving_picker() as rig:
        process = await asyncio.create_subprocess_exec(
            *(str(program), "-h", "127.0.0.1", "-p", str(rig.server.port), "-o", "10", "-j", str(report)),
            stdout=asyncio.subprocess.PIPE,
        )
        shown, _ = await asyncio.wait_for(process.communicate(), 240)
    cases = read_report(report)
    assert len(cases) >= 145, shown.decode()
    failed = {text: failure for text, failure in cases if failure}
    assert failed.keys() == LEFT_OUT.keys(), failed
    assert not rig.server.streams.live
