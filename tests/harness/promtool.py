"""Debian's Prometheus and its promtool, which checks the rules of a chart and runs them on made-up series.

The package is unpacked from Debian's archive into the cache under its version, and not installed.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.harness.cached_builds import CachedBuild, cache_folder, run
from tests.harness.prepared import CLUSTER, lacking

_PACKAGE: Final = "prometheus"


def promtool(*arguments: str | Path) -> None:
    """Run the program. Fail with its own words if it finds a fault."""
    done = subprocess.run(
        [program("promtool"), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def program(name: str) -> Path:
    """Return a program of the package. Skip the test if Debian's archive cannot be reached."""
    if shutil.which("apt-get") is None:
        lacking(f"{name} is taken from Debian's archive, and this is no Debian", required_by=CLUSTER)

    def fill(folder: Path) -> None:
        run("apt-get", "download", _PACKAGE, cwd=folder)
        (archive,) = folder.glob("*.deb")
        run("dpkg-deb", "--extract", archive, folder)
        archive.unlink()

    found = CachedBuild(cache_folder() / f"{_PACKAGE}-{_version()}")
    return found.build(_PACKAGE, fill, progress=print).folder / "usr" / "bin" / name


def _version() -> str:
    """Return the version in the archive, as part of a file's name. The archive's list is fetched if there is
    none yet.
    """
    for fetch in (False, True):
        if fetch:
            run("apt-get", "update", "--quiet")
        shown = subprocess.run(
            ["apt-cache", "policy", _PACKAGE], capture_output=True, text=True, check=True
        ).stdout
        found = re.search(r"Candidate: (\S+)", shown)
        if found and found[1] != "(none)":
            return re.sub(r"[^A-Za-z0-9.]", "-", found[1])
    raise AssertionError(f"the archive has no package {_PACKAGE}")
