"""Fetches a Go module at its pinned version and hash. The module's go.sum holds the hashes of its
dependencies, and a build checks them.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from tests.harness.cached_builds import BuildFailedError, run

BUILD: Final = ("build", "-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w")
_STATIC: Final = {"CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}


def downloaded(name: str, go_sum: str, *, go: Path) -> Path:
    """Return the folder of the module. Raise BuildFailedError if it is not the pinned module."""
    done = subprocess.run(
        [str(go), "mod", "download", "-json", name],
        check=False,
        stdout=subprocess.PIPE,
        cwd=tempfile.gettempdir(),
        env={**os.environ, "GOFLAGS": "-mod=mod", "GOWORK": "off"},
    )
    listed = json.loads(done.stdout or b"{}")
    if done.returncode or listed.get("Sum") != go_sum:
        raise BuildFailedError(
            f"{name} could not be fetched as pinned: {listed.get('Error') or listed.get('Sum')}"
        )
    return Path(listed["Dir"])


def compiled(go: Path, *arguments: str | Path, source: Path) -> None:
    """Run Go in the folder of a module, for one statically linked binary."""
    run(go, *arguments, cwd=source, env=_STATIC)
