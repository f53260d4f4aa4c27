"""The CRDs that the charts use and a bare control plane lacks. They belong to Gateway API, Envoy Gateway,
Istio, the Prometheus operator, LeaderWorkerSet, KEDA and cert-manager. This module reads them from the
projects' Go modules into the user's cache, at the versions and hashes below. The fixtures call it.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.cluster_env import environment
from tests.cluster_env.go_modules import downloaded
from tests.cluster_env.go_programs import Keda
from tests.harness.cached_builds import CachedBuild, cache_folder, content_key


@dataclass(frozen=True, slots=True)
class Module:
    """A Go module and the files that the tests take from it."""

    name: str
    go_sum: str
    files: tuple[str, ...]


MODULES: Final = (
    Module(
        "sigs.k8s.io/gateway-api@v1.4.0",
        "h1:ZwlNM6zOHq0h3WUX2gfByPs2yAEsy/EenYJB78jpQfQ=",
        (
            "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
            "config/crd/standard/gateway.networking.k8s.io_backendtlspolicies.yaml",
        ),
    ),
    Module(
        "github.com/envoyproxy/gateway@v1.9.1",
        "h1:vAVp6/AlBXJ1aOhp1mxL7fNEzVEfjADUguUhm2wzxQY=",
        tuple(
            f"charts/gateway-helm/charts/crds/crds/generated/gateway.envoyproxy.io_{kind}.yaml"
            for kind in ("envoyextensionpolicies", "backendtrafficpolicies", "clienttrafficpolicies")
        ),
    ),
    Module(
        "istio.io/api@v1.28.0",
        "h1:0fYY9G03CAdFwE/fCkpr0v7kKsy+Hz9OCCjLNBNLbnU=",
        ("kubernetes/customresourcedefinitions.gen.yaml",),
    ),
    Module(
        "github.com/prometheus-operator/prometheus-operator@v0.85.0",
        "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
        (
            "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
            "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
            "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
        ),
    ),
    Module(
        "sigs.k8s.io/lws@v0.8.0",
        "h1:DdhJ8QabwTfWgbgaHH2gdf8twliioHaoSfmDXRYEVU0=",
        ("config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",),
    ),
    Module(Keda.module, Keda.module_hash, ("config/crd/bases/keda.sh_scaledobjects.yaml",)),
    Module(
        "github.com/cert-manager/cert-manager@v1.19.0",
        "h1:pPKtK06zPriliwq7B12xa7DGKbc4SvnfOjE0BXaAspk=",
        ("deploy/crds/cert-manager.io_certificates.yaml",),
    ),
)


def fetch(*, progress: Callable[[str], None]) -> Path:
    """Return a folder of YAML. If the cache holds the folder, this takes no time. Raise BuildFailedError if
    the files cannot be fetched.
    """

    def fill(folder: Path) -> None:
        go = environment.find_go(progress)
        for module in MODULES:
            progress(f"reading CRDs from {module.name}")
            _copy(module, go=go, folder=folder)

    found = CachedBuild(cache_folder() / f"chart-crds-{content_key(repr(MODULES).encode())}")
    return found.build("chart-crds", fill, progress=progress).folder


def _copy(module: Module, *, go: Path, folder: Path) -> None:
    source = downloaded(module.name, module.go_sum, go=go)
    for name in module.files:
        shutil.copyfile(source / name, folder / Path(name).name)
