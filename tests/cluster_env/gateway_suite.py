"""Owns the cached conformance suite of gateway-api-inference-extension: its test program, the echo server
that it deploys, and the CRDs of its version.

v1.3.0 is the last version whose suite lies in the main module. The command line and the fixtures call this
module.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.cluster_env.environment import BUILD_COMMAND, find_go
from tests.cluster_env.go_modules import BUILD, compiled, downloaded
from tests.harness.cached_builds import CachedBuild, cache_folder, content_key

VERSION: Final = "v1.3.0"
_MODULE: Final = f"sigs.k8s.io/gateway-api-inference-extension@{VERSION}"
_MODULE_HASH: Final = "h1:Ng2Qs1Oum4WycuWyi3rOkAC7pZ2aDqgN2ku6Lr/mryQ="
_GATEWAY_API: Final = "sigs.k8s.io/gateway-api"
_CRDS: Final = ("gatewayclasses", "gateways", "httproutes")
_RECIPE: Final = b"1"
"""Raise this number when a change to `_fill` changes the files that it writes."""


@dataclass(frozen=True, slots=True)
class GatewaySuite(CachedBuild):
    """The paths of the suite's files."""

    @property
    def program(self) -> Path:
        """Return the suite, a Go test program."""
        return self.folder / "bin" / "suite"

    @property
    def echo(self) -> Path:
        """Return the server that the suite's pods run in place of a model server."""
        return self.folder / "bin" / "echo"

    @property
    def crds(self) -> Path:
        return self.folder / "crds"


def locate() -> GatewaySuite:
    """Return the place of the suite for this checkout, whether it exists or not."""
    key = content_key(_RECIPE, platform.machine().encode(), _MODULE_HASH.encode())
    return GatewaySuite(folder=cache_folder() / f"gateway-suite-{key}")


def require() -> GatewaySuite:
    return locate().required("the conformance suite is", command=BUILD_COMMAND)


def build(*, progress: Callable[[str], None]) -> GatewaySuite:
    """Build the suite if it is missing, and tell `progress` each step."""

    def fill(folder: Path) -> None:
        _fill(GatewaySuite(folder), go=find_go(progress), progress=progress)

    return locate().build("gateway-suite", fill, progress=progress)


def _fill(target: GatewaySuite, *, go: Path, progress: Callable[[str], None]) -> None:
    source = downloaded(_MODULE, _MODULE_HASH, go=go)
    progress(f"compiling the conformance suite {VERSION}: two minutes of CPU if Go's cache is empty")
    target.program.parent.mkdir()
    compiled(go, "test", "-c", "-vet=off", *BUILD[1:], "-o", target.program, "./conformance", source=source)
    echo = f"{_GATEWAY_API}/conformance/echo-basic"
    compiled(go, *BUILD, "-o", target.echo, echo, source=source)
    target.crds.mkdir()
    bases = source / "config" / "crd" / "bases"
    shutil.copyfile(bases / "inference.networking.k8s.io_inferencepools.yaml", target.crds / "pools.yaml")
    listing = (str(go), "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", _GATEWAY_API)
    api = Path(subprocess.run(listing, check=True, capture_output=True, text=True, cwd=source).stdout.strip())
    for kind in _CRDS:
        name = f"gateway.networking.k8s.io_{kind}.yaml"
        shutil.copyfile(api / "config" / "crd" / "standard" / name, target.crds / name)
