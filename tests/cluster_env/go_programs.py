"""Owns the cached programs that are compiled from one Go module each, with what else lies in that module:
Envoy Gateway, KEDA, and the conformance suite of gateway-api-inference-extension.

Each is in one folder of the cache (`tests.harness.cached_builds`), keyed by the module's hash. The command
line and the fixtures call this module.
"""

import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Self

from tests.cluster_env import environment
from tests.cluster_env.environment import BUILD_COMMAND, find_go
from tests.cluster_env.go_modules import BUILD, compiled, downloaded
from tests.harness.cached_builds import CachedBuild, Progress, cache_folder, content_key, say

IMAGE: Final = "docker.io/envoyproxy/gateway"
_EXTENSION: Final = "sigs.k8s.io/gateway-api-inference-extension"


@dataclass(frozen=True, slots=True)
class GoProgram(CachedBuild):
    """A derived class names the module, and fills the folder with its files."""

    kind: ClassVar[str]
    what: ClassVar[str]
    module: ClassVar[str]
    module_hash: ClassVar[str]
    recipe: ClassVar[bytes] = b"1"
    """Raise this number when a change to `fill` changes the files that it writes."""

    @classmethod
    def locate(cls) -> Self:
        """Return the place of the build for this checkout, whether it exists or not."""
        key = content_key(cls.recipe, platform.machine().encode(), cls.module_hash.encode())
        return cls(folder=cache_folder() / f"{cls.kind}-{key}")

    @classmethod
    def require(cls) -> Self:
        return cls.locate().required(cls.what, command=BUILD_COMMAND)

    @classmethod
    def prepare(cls, *, progress: Progress) -> Self:
        """Build what is missing, and tell `progress` each step."""

        def fill(folder: Path) -> None:
            go = find_go(progress)
            source = downloaded(cls.module, cls.module_hash, go=go)
            progress(f"compiling {cls.module}: minutes of CPU if Go's cache is empty")
            (folder / "bin").mkdir()
            cls(folder).fill(source, go=go)

        return cls.locate().build(cls.kind, fill, progress=progress)

    def fill(self, source: Path, *, go: Path) -> None:
        """Fill the folder from the module's source."""
        raise NotImplementedError

    @property
    def crds(self) -> Path:
        """Return a folder of YAML."""
        return self.folder / "crds"


@dataclass(frozen=True, slots=True)
class EnvoyGateway(GoProgram):
    """The program, and the chart and CRDs that lie in its module."""

    kind: ClassVar[str] = "envoy-gateway"
    what: ClassVar[str] = "Envoy Gateway is"
    version: ClassVar[str] = "v1.9.1"
    module: ClassVar[str] = f"github.com/envoyproxy/gateway@{version}"
    module_hash: ClassVar[str] = "h1:vAVp6/AlBXJ1aOhp1mxL7fNEzVEfjADUguUhm2wzxQY="

    @property
    def program(self) -> Path:
        return self.folder / "bin" / "envoy-gateway"

    @property
    def chart(self) -> Path:
        return self.folder / "gateway-helm"

    def fill(self, source: Path, *, go: Path) -> None:
        compiled(go, *BUILD, "-o", self.program, "./cmd/envoy-gateway", source=source)
        shutil.copytree(source / "charts" / "gateway-helm", self.chart, copy_function=shutil.copyfile)
        for folder in (self.chart, *(path for path in self.chart.rglob("*") if path.is_dir())):
            folder.chmod(0o755)  # a module's folders are read-only
        (self.chart / "charts" / "crds" / "crds").rename(self.crds)
        template = self.chart / "values.tmpl.yaml"
        values = template.read_text().replace("${GatewayImage}", f"{IMAGE}:{self.version}")
        (self.chart / "values.yaml").write_text(values.replace("${GatewayImagePullPolicy}", "IfNotPresent"))


@dataclass(frozen=True, slots=True)
class Keda(GoProgram):
    """The operator, the metrics adapter, and the CRDs that they read. The webhooks are left out."""

    kind: ClassVar[str] = "keda"
    what: ClassVar[str] = "KEDA is"
    module: ClassVar[str] = "github.com/kedacore/keda/v2@v2.19.0"
    module_hash: ClassVar[str] = "h1:IP3iMTwr9HkaAwPtLnhngPv74LghMf7ubLrsGLQo52M="
    recipe: ClassVar[bytes] = b"2"

    @property
    def operator(self) -> Path:
        """Return the program that scales between zero pods and one."""
        return self.folder / "bin" / "operator"

    @property
    def adapter(self) -> Path:
        """Return the API server of external metrics, which a HorizontalPodAutoscaler reads."""
        return self.folder / "bin" / "adapter"

    def fill(self, source: Path, *, go: Path) -> None:
        for program in (self.operator, self.adapter):
            compiled(go, *BUILD, "-o", program, f"./cmd/{program.name}", source=source)
        shutil.copytree(source / "config" / "crd" / "bases", self.crds, copy_function=shutil.copyfile)
        self.crds.chmod(0o755)  # a module's folders are read-only


@dataclass(frozen=True, slots=True)
class GatewaySuite(GoProgram):
    """The suite's test program, its echo server, and its CRDs."""

    kind: ClassVar[str] = "gateway-suite"
    what: ClassVar[str] = "the conformance suite is"
    version: ClassVar[str] = "v1.6.0"
    module: ClassVar[str] = f"{_EXTENSION}/conformance@{version}"
    module_hash: ClassVar[str] = "h1:IHzyGYgGKMf7bYGDY59K72tIpng1jVohBi32RXOrFxE="
    extension_hash: ClassVar[str] = "h1:cjtwMJYcTnLXBYE5ffR1/hHhn7U1aIFfe2RITYmOXVA="

    @property
    def program(self) -> Path:
        """Return the suite, a Go test program."""
        return self.folder / "bin" / "suite"

    @property
    def echo(self) -> Path:
        """Return the server that the suite's pods run in place of a model server."""
        return self.folder / "bin" / "echo"

    def fill(self, source: Path, *, go: Path) -> None:
        api = "sigs.k8s.io/gateway-api"
        extension = downloaded(f"{_EXTENSION}@{self.version}", self.extension_hash, go=go)
        # In go.mod the extension is in the folder above, as in a checkout.
        module = self.folder / "suite.mod"
        module.write_text((source / "go.mod").read_text().replace("=> ../\n", f"=> {extension}\n"))
        shutil.copyfile(source / "go.sum", module.with_suffix(".sum"))
        options = (*BUILD[1:], f"-modfile={module}")
        compiled(go, "test", "-c", "-vet=off", *options, "-o", self.program, ".", source=source)
        echo = f"{api}/conformance/echo-basic"
        compiled(go, "build", *options, "-o", self.echo, echo, source=source)
        self.crds.mkdir()
        bases = extension / "config" / "crd" / "bases"
        shutil.copyfile(bases / "inference.networking.k8s.io_inferencepools.yaml", self.crds / "pools.yaml")
        listing = (str(go), "list", f"-modfile={module}", "-m", "-f", "{{.Dir}}", api)
        listed = subprocess.run(
            listing, check=True, capture_output=True, text=True, cwd=source
        ).stdout.strip()
        for kind in ("gatewayclasses", "gateways", "httproutes"):
            name = f"gateway.networking.k8s.io_{kind}.yaml"
            shutil.copyfile(Path(listed) / "config" / "crd" / "standard" / name, self.crds / name)


def build_all(*, progress: Progress = say) -> None:
    """Build the control plane, and the programs."""
    environment.build(progress=progress)
    for program in (EnvoyGateway, Keda, GatewaySuite):
        program.prepare(progress=progress)
