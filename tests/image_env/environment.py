"""Owns the built images of deploy/docker. The cache has the root folder of each image, its settings and its
bills of materials.

mmdebstrap makes the bases from Debian's packages, and the key of a base is its recipe. An image's key is its
base's recipe and every file that its Dockerfile copies. So an unchanged image is not built again. After a
change of one source file only the later steps run, because buildah keeps the layers of earlier builds. The
images are built by `make images`, as a user builds them.
"""

import json
import platform
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.harness.cached_builds import (
    UNFINISHED,
    BuildFailedError,
    CachedBuild,
    Progress,
    built_elsewhere,
    cache_folder,
    content_key,
    folder_bytes,
    lock_requirements,
    only_builder,
    remove_unfinished,
    run,
    say,
)
from tests.image_env.dockerfiles import FOLDER, REPOSITORY, context_files
from tests.image_env.engine import Engine, require_packages

BUILD_COMMAND: Final = "make image-env"
NAMES: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.Dockerfile")))
_RECIPE: Final = b"1"
"""Raise this number when a base or the content of a built folder is made in another way."""
_SUITE: Final = "bookworm"
_RUN_PACKAGES: Final = ("python3", "python-is-python3", "ca-certificates")
_BUILD_PACKAGES: Final = (*_RUN_PACKAGES, "python3-venv", "python3-dev", "gcc", "libc6-dev")
_LEFT_OUT: Final = ("/usr/share/man/*", "/usr/share/locale/*", "/usr/share/doc/*")
_REGISTRY: Final = "localhost"
_STORAGE_LIMIT_BYTES: Final = 8_000_000_000
_TOOLS_LOCK: Final = REPOSITORY / "requirements" / "images.txt"
_KEPT: Final = 2
"""The number of built folders that stay for each image: this checkout's, and one more."""


@dataclass(frozen=True, slots=True)
class BuiltImage(CachedBuild):
    """One image, taken out of the engine."""

    name: str

    @property
    def root(self) -> Path:
        """Its root folder. Nobody may change the folder."""
        return self.folder / "root"

    @property
    def config(self) -> dict[str, Any]:
        """Its Entrypoint, Cmd, Env and User."""
        found: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return found

    def materials(self, of: str) -> dict[str, Any]:
        """Return its bill of materials in CycloneDX. `kind` is `python` or `debian`."""
        found: dict[str, Any] = json.loads((self.folder / f"{of}.cdx.json").read_text())
        return found

    @property
    def base_bytes(self) -> int:
        return folder_bytes(self.root) - self.own_bytes

    @property
    def own_bytes(self) -> int:
        """Return the number of bytes that the Dockerfile adds to its base."""
        return sum(folder_bytes(self.root / name) for name in ("opt", "app") if (self.root / name).is_dir())


def base_key() -> str:
    return content_key(
        _RECIPE, platform.machine().encode(), _SUITE.encode(), " ".join(_BUILD_PACKAGES).encode()
    )


def locate(name: str) -> BuiltImage:
    """Return the place of this checkout's image, whether it exists or not."""
    files = context_files(FOLDER / f"{name}.Dockerfile")
    contents = [part for f in files for part in (str(f.relative_to(REPOSITORY)).encode(), f.read_bytes())]
    key = content_key(base_key().encode(), _TOOLS_LOCK.read_bytes(), *contents)
    return BuiltImage(name=name, folder=cache_folder() / f"image-{name}-{key}")


def require() -> dict[str, BuiltImage]:
    """Return all images of this checkout by name. Raise BuildFailedError if they have not been built."""
    found = {name: locate(name) for name in NAMES}
    missing = [name for name, image in found.items() if not image.ready]
    if missing:
        raise BuildFailedError(
            f"the images {', '.join(missing)} are not built; build them with `{BUILD_COMMAND}`"
        )
    return found


def build(*, progress: Progress = say) -> None:
    """Build the images that are missing, and tell `progress` each step and the sizes."""
    found = {name: locate(name) for name in NAMES}
    require_packages(progress)
    if all(image.ready for image in found.values()):
        return
    with only_builder("images", progress=progress):
        remove_unfinished(("image", "images"), progress=progress)
        tools, engine = _tools(progress), prepared_engine(progress=progress)
        for name, image in found.items():
            if not image.ready:
                progress(f"building the image {name}")
                make_image(name, engine)
                with built_elsewhere(image.folder) as folder:
                    _take_out(engine, image.name, folder, tools=tools)
                _forget_older(image)
                own, base = image.own_bytes / 1e6, image.base_bytes / 1e6
                progress(f"{name}: {own:.0f} MB on a base of {base:.0f} MB")


def prepared_engine(*, progress: Progress) -> Engine:
    """Return the engine with both bases and the layers of earlier builds. The caller holds the lock."""
    folder = cache_folder() / f"images-engine-{base_key()}"
    _unmount(folder)
    whole = all((folder / f"{name}.tar").is_file() for name in ("run", "build"))
    if folder.is_dir() and (not whole or folder_bytes(folder) > _STORAGE_LIMIT_BYTES):
        progress("the layers of earlier builds are too many or incomplete: starting from nothing")
        # The folder gets a temporary name first, so that no process uses a half removed folder as the engine.
        shutil.rmtree(folder.rename(folder.with_name(f"{folder.name}{UNFINISHED}old")))
    if not folder.is_dir():
        with built_elsewhere(folder) as made:
            for name, packages in (("run", _RUN_PACKAGES), ("build", _BUILD_PACKAGES)):
                progress(f"making the base `{name}` from Debian's packages: about a minute")
                _make_base(made / f"{name}.tar", packages)
    engine = Engine(folder)
    for name in ("run", "build"):
        engine.import_base(folder / f"{name}.tar", _base(name))
    return engine


def _unmount(folder: Path) -> None:
    """Unmount everything that a killed build left mounted, the deepest first. Mounted folders can be neither
    counted nor removed.
    """
    mounted = [Path(line.split()[1]) for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in sorted((place for place in mounted if folder in place.parents), reverse=True):
        run("umount", "--lazy", place)


def _base(name: str) -> str:
    return f"{_REGISTRY}/base-{name}:{base_key()}"


def base_arguments() -> Sequence[str]:
    """Return the arguments of a build that replace the official bases by ours."""
    return ("--build-arg", f"BASE={_base('run')}", "--build-arg", f"BUILD_BASE={_base('build')}")


def _make_base(tarball: Path, packages: tuple[str, ...]) -> None:
    run(
        *("mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", f"--include={','.join(packages)}"),
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT),
        *("--dpkgopt=path-include=/usr/share/doc/*/copyright", _SUITE, tarball),
    )


def make_image(name: str, engine: Engine) -> None:
    """Build an image by `make images`, in the engine's own store. This is quick if an earlier build left the
    layers there.
    """
    run(
        *("make", "--no-print-directory", "images", f"IMAGES={name}", f"REGISTRY={_REGISTRY}"),
        *(f"BASE={_base('run')}", f"BUILD_BASE={_base('build')}", f"ENGINE={shlex.join(engine.command)}"),
        f"BUILD_FLAGS={shlex.join(engine.build_flags())}",
        cwd=REPOSITORY,
    )


def _take_out(engine: Engine, name: str, folder: Path, *, tools: Path) -> None:
    tag = f"{_REGISTRY}/{name}:{version()}"
    (folder / "config.json").write_text(json.dumps(engine.config(tag)))
    with engine.container(tag) as (container, root):
        run("cp", "--archive", f"{root}/.", folder / "root")
        code = "import sys; sys.path.insert(0, '/materials'); from cyclonedx_py._internal.cli import run; sys.exit(run())"
        words = ("environment", "--output-reproducible", "/opt/venv/bin/python")
        python = engine.run_in(container, "python", "-I", "-c", code, *words, mounts=[(tools, "/materials")])
    (folder / "python.cdx.json").write_text(python)
    run(
        *(sys.executable, "-c", "from debsbom.cli import main; main()", "generate", "--sbom-type", "cdx"),
        *("--root", folder / "root", "--out", folder / "debian"),
        env={"PYTHONPATH": str(tools)},
    )


def _tools(progress: Progress) -> Path:
    """Return the programs that write bills of materials."""

    def fill(folder: Path) -> None:
        progress("installing the programs that write bills of materials")
        run(
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--require-hashes", "--target", folder, "-r", _TOOLS_LOCK),
        )

    found = CachedBuild(cache_folder() / f"images-tools-{content_key(_TOOLS_LOCK.read_bytes())}")
    return found.build("images-tools", fill, progress=progress).folder


def version() -> str:
    """Return the charts' version, with which the images are tagged."""
    chart = (REPOSITORY / "deploy" / "helm" / "prefix-gateway" / "Chart.yaml").read_text()
    return next(line.split()[1] for line in chart.splitlines() if line.startswith("appVersion:"))


def lock() -> None:
    """Write the requirement file anew."""
    lock_requirements(_TOOLS_LOCK, _TOOLS_LOCK.with_suffix(".in"))


def _forget_older(image: BuiltImage) -> None:
    """Remove the folders of earlier states of this image, except the newest ones."""
    found = [f for f in image.folder.parent.glob(f"image-{image.name}-*") if f != image.folder]
    for folder in sorted(found, key=lambda f: f.stat().st_mtime, reverse=True)[_KEPT - 1 :]:
        shutil.rmtree(folder, ignore_errors=True)
