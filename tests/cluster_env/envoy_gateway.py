"""Owns the cached Envoy Gateway: its program, compiled from its Go module, and the chart and CRDs that lie in
that module.

They are in one folder of the cache (`tests.harness.cached_builds`), keyed by the version. The command line
and the fixtures call this module.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.cluster_env.environment import BUILD_COMMAND, find_go
from tests.cluster_env.go_modules import BUILD, compiled, downloaded
from tests.harness.cached_builds import CachedBuild, cache_folder, content_key

VERSION: Final = "v1.9.1"
IMAGE: Final = "docker.io/envoyproxy/gateway"
_MODULE: Final = f"github.com/envoyproxy/gateway@{VERSION}"
_MODULE_HASH: Final = "h1:vAVp6/AlBXJ1aOhp1mxL7fNEzVEfjADUguUhm2wzxQY="
_RECIPE: Final = b"1"
"""Raise this number when a change to `_fill` changes the files that it writes."""


@dataclass(frozen=True, slots=True)
class EnvoyGateway(CachedBuild):
    """The paths of Envoy Gateway's files."""

    @property
    def program(self) -> Path:
        return self.folder / "bin" / "envoy-gateway"

    @property
    def chart(self) -> Path:
        return self.folder / "gateway-helm"

    @property
    def crds(self) -> Path:
        """Return a folder of YAML with the CRDs of Gateway API and of Envoy Gateway."""
        return self.folder / "crds"


def locate() -> EnvoyGateway:
    """Return the place of Envoy Gateway for this checkout, whether it exists or not."""
    key = content_key(_RECIPE, platform.machine().encode(), _MODULE_HASH.encode())
    return EnvoyGateway(folder=cache_folder() / f"envoy-gateway-{key}")


def require() -> EnvoyGateway:
    return locate().required("Envoy Gateway is", command=BUILD_COMMAND)


def build(*, progress: Callable[[str], None]) -> EnvoyGateway:
    """Build Envoy Gateway if it is missing, and tell `progress` each step."""

    def fill(folder: Path) -> None:
        _fill(EnvoyGateway(folder), go=find_go(progress), progress=progress)

    return locate().build("envoy-gateway", fill, progress=progress)


def _fill(target: EnvoyGateway, *, go: Path, progress: Callable[[str], None]) -> None:
    source = downloaded(_MODULE, _MODULE_HASH, go=go)
    progress(f"compiling Envoy Gateway {VERSION}: 400 seconds of CPU if Go's cache is empty")
    target.program.parent.mkdir()
    compiled(go, *BUILD, "-o", target.program, "./cmd/envoy-gateway", source=source)
    shutil.copytree(source / "charts" / "gateway-helm", target.chart, copy_function=shutil.copyfile)
    for folder in (target.chart, *(path for path in target.chart.rglob("*") if path.is_dir())):
        folder.chmod(0o755)  # a module's folders are read-only
    (target.chart / "charts" / "crds" / "crds").rename(target.crds)
    template = target.chart / "values.tmpl.yaml"
    values = template.read_text().replace("${GatewayImage}", f"{IMAGE}:{VERSION}")
    (target.chart / "values.yaml").write_text(values.replace("${GatewayImagePullPolicy}", "IfNotPresent"))
