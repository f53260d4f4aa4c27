"""The images that buildah built from deploy/docker: what is in them, and builds that must fail."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.harness.cached_builds import only_builder
from tests.harness.ports import free_port
from tests.harness.processes import connects, managed_process
from tests.image_env import environment
from tests.image_env.dockerfiles import FOLDER, REPOSITORY, context_files
from tests.image_env.engine import Engine, pip_settings
from tests.image_env.environment import NAMES, BuiltImage

pytestmark = pytest.mark.cluster

Images = Mapping[str, BuiltImage]
EACH = pytest.mark.parametrize("name", NAMES)
LARGEST_OWN_MB = {"picker": 300, "model-server": 200, "load": 100}
"""The most megabytes that the Dockerfile may add to its base image. numpy, kubernetes and grpc are most of
them.
"""
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "make", "ld")


@pytest.fixture
def engine(built_images: Images) -> Iterator[Engine]:
    """Return buildah with the layers of the builds. No other process builds at the same time."""
    with only_builder("images", progress=print):
        yield environment.prepared_engine(progress=print)


def packages_in(image: BuiltImage) -> Path:
    return image.root / "opt/venv/lib/python3.11/site-packages"


@EACH
def test_an_image_is_small_and_runs_as_nobody(built_images: Images, name: str) -> None:
    image = built_images[name]
    print(f"{name}: {image.own_bytes / 1e6:.0f} MB on a base of {image.base_bytes / 1e6:.0f} MB")
    assert image.own_bytes / 1e6 < LARGEST_OWN_MB[name]
    assert re.fullmatch(r"65532:65532", image.config["User"])


@EACH
def test_the_image_has_no_compiler_and_no_installer(built_images: Images, name: str) -> None:
    root = built_images[name].root
    found = [
        program
        for program in COMPILERS
        for folder in ("usr/bin", "opt/venv/bin")
        if (root / folder / program).exists()
    ]
    assert not found
    assert not list((root / "opt/venv/bin").glob("pip*"))
    assert not [p.name for p in packages_in(built_images[name]).iterdir() if p.name in {"pip", "setuptools"}]


@EACH
def test_nothing_of_this_machine_is_in_the_image(built_images: Images, name: str) -> None:
    root = built_images[name].root
    assert not (root / "etc/pip.conf").exists() or not (root / "etc/pip.conf").read_text()
    addresses = [value for value in pip_settings().values() if "://" in value]
    for file in (root / "opt").rglob("*.json"):
        assert not [a for a in addresses if a in file.read_text(errors="replace")], file


def test_the_picker_has_its_c_extensions(built_images: Images) -> None:
    packages = packages_in(built_images["picker"])
    assert list(packages.glob("epp/request/_jsontext.*.so"))
    assert list(packages.glob("epp/protocol/_wire.*.so"))
    assert list(packages.glob("epp/picker/prefix_index/_chain.*.so"))


@EACH
def test_its_bill_of_materials_lists_every_locked_package_and_the_bases(
    built_images: Images, name: str
) -> None:
    image = built_images[name]
    listed = {
        c["name"].lower().replace("_", "-"): c["version"] for c in image.materials("python")["components"]
    }
    installed = {
        folder.name.partition("-")[0].lower().replace("_", "-").replace(".", "-")
        for folder in packages_in(image).glob("*.dist-info")
    }
    assert installed <= {each.replace(".", "-") for each in listed}
    locked = dict(
        re.findall(
            r"^([\w.-]+)==([\w.+]+)", (REPOSITORY / f"requirements/{name}.txt").read_text(), re.MULTILINE
        )
    )
    assert {n: v for n, v in listed.items() if n in locked and n != "numpy"}.items() <= locked.items()
    debian = {c["name"] for c in image.materials("debian")["components"]}
    assert {"libc6", "python3.11-minimal", "ca-certificates"} <= debian


@pytest.mark.timeout(900)
def test_a_build_without_the_c_extension_fails(engine: Engine, tmp_path: Path) -> None:
    dockerfile = FOLDER / "picker.Dockerfile"
    for file in context_files(dockerfile):
        place = tmp_path / file.relative_to(REPOSITORY)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    (tmp_path / "epp/request/_jsontext.c").write_text("this is no C")
    words = (
        "build",
        *engine.build_flags(),
        *environment.base_arguments(),
        "-f",
        dockerfile,
        "-t",
        "never",
        tmp_path,
    )
    done = subprocess.run([*engine.command, *map(str, words)], check=False, capture_output=True, text=True)
    assert done.returncode
    assert "epp/request/_jsontext.c" in done.stdout + done.stderr, "the compiler refuses this file"


@pytest.mark.timeout(600)
async def test_make_push_brings_the_images_to_a_registry(
    engine: Engine, built_images: Images, tmp_path: Path
) -> None:
    """The registry is Debian's docker-registry, on loopback."""
    port = free_port()
    (tmp_path / "config.yml").write_text(
        f"{{version: 0.1, storage: {{filesystem: {{rootdirectory: {tmp_path / 'store'}}}}}, http: {{addr: '127.0.0.1:{port}'}}}}"
    )
    image = f"localhost/load:{environment.version()}"
    environment.make_image(
        "load", engine
    )  # the engine's store may have been emptied since the image was built
    async with managed_process(
        "docker-registry",
        ["docker-registry", "serve", str(tmp_path / "config.yml")],
        directory=tmp_path,
    ) as registry:
        await registry.wait_ready(lambda: connects("127.0.0.1", port))
        target = f"127.0.0.1:{port}/team"
        subprocess.run([*engine.command, "tag", image, f"{target}/load:{environment.version()}"], check=True)
        words = ("push", f"REGISTRY={target}", "IMAGES=load", "PUSH_FLAGS=--tls-verify=false")
        done = subprocess.run(
            ["make", "--no-print-directory", *words, f"ENGINE={' '.join(engine.command)}"],
            cwd=REPOSITORY,
            check=False,
            capture_output=True,
            text=True,
        )
        subprocess.run([*engine.command, "rmi", f"{target}/load:{environment.version()}"], check=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "store/docker/registry/v2/repositories/team/load").is_dir()
