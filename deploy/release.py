"""Builds all files of a release into a folder: `make release`.

The folder gets the wheel and the source archive, each chart as an archive and as an OCI layout, a bill of
materials (CycloneDX) of each image, the images if a container engine is there, and the checksums of all
files. With a GPG key, the checksums are signed. With an address, the wheel and the charts name it as the home
of the project: the repository names none, since whoever builds a release decides where it lives. Nothing is
uploaded, and nothing that exists is replaced: a version is built once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
CHARTS = ("prefix-gateway", "model-server")
IMAGES = {"picker": "picker.txt", "model-server": "model-server.txt", "load": "load.txt"}
"""Each image, and the file of requirements from which it is built."""
_SBOM_TOOL = "cyclonedx-bom==7.5.0"
_CONFIG = "application/vnd.cncf.helm.config.v1+json"
_LAYER = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class ReleaseError(Exception):
    """The release cannot be built. The message says what to do."""


def version() -> str:
    """Return the one version. Raises ReleaseError if package and charts differ."""
    found = {
        "pyproject.toml": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"],
        **{
            f"deploy/helm/{chart}/Chart.yaml, {key}": chart_facts(chart)[key]
            for chart in CHARTS
            for key in ("version", "appVersion")
        },
    }
    if len(set(found.values())) > 1:
        raise ReleaseError(f"these have to be the same version: {found}")
    return str(found["pyproject.toml"])


def chart_facts(chart: str, *, source: Path = ROOT) -> dict[str, str]:
    facts: dict[str, str] = yaml.safe_load((source / "deploy/helm" / chart / "Chart.yaml").read_text())
    return facts


def oci_layout(archive: Path, facts: dict[str, str], folder: Path) -> None:
    """Write a chart's archive as an OCI image layout, which `oras` and `skopeo` copy to a registry."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes, media_type: str) -> dict[str, object]:
        name = hashlib.sha256(data).hexdigest()
        (blobs / name).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{name}", "size": len(data)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": blob(json.dumps(facts).encode(), _CONFIG),
        "layers": [blob(archive.read_bytes(), _LAYER)],
        "annotations": {
            "org.opencontainers.image.title": facts["name"],
            "org.opencontainers.image.version": facts["version"],
        },
    }
    described = blob(json.dumps(manifest).encode(), _MANIFEST)
    described["annotations"] = {"org.opencontainers.image.ref.name": facts["version"]}
    index = {"schemaVersion": 2, "manifests": [described]}
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))


def with_home(home: str, stage: Path) -> Path:
    """Return a copy of the committed files in which the wheel and the charts name their home."""
    subprocess.run(["git", "archive", "-o", stage / "tree.tar", "HEAD"], cwd=ROOT, check=True)
    source = stage / "tree"
    with tarfile.open(stage / "tree.tar") as tar:
        tar.extractall(source, filter="data")
    with (source / "pyproject.toml").open("a") as project:
        project.write(f'\n[project.urls]\nHomepage = "{home}"\nChangelog = "{home}/CHANGELOG.md"\n')
    for chart in CHARTS:
        with (source / "deploy/helm" / chart / "Chart.yaml").open("a") as facts:
            facts.write(f'home: "{home}"\nsources: ["{home}"]\n')
    return source


def package(chart: str, folder: Path, *, source: Path = ROOT) -> Path:
    """Write the archive of a chart, in the form of `helm package`: one folder with the chart's name."""
    facts = chart_facts(chart, source=source)
    archive = folder / f"{chart}-{facts['version']}.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source / "deploy/helm" / chart, arcname=chart)
    oci_layout(archive, facts, folder / f"{chart}-{facts['version']}.oci")
    return archive


def checksums(folder: Path) -> Path:
    listed = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n" for path in listed
    ]
    written = folder / "SHA256SUMS"
    written.write_text("".join(lines))
    return written


def build(
    folder: Path, *, engine: Sequence[str], key: str, home: str = "", flags: Sequence[str] = ()
) -> None:
    """Build all files. Raises ReleaseError.

    engine: the command of docker, podman or buildah. Empty: no images. key: GPG's name of the key that signs.
    Empty: no signature. home: the address that wheel and charts name. Empty: none.
    flags: the engine's options for each build of an image.
    """
    if folder.exists():
        raise ReleaseError(f"{folder} exists: a version is built once; remove it, or raise the version")
    if home and not re.fullmatch(r"https://[\w./-]+\w", home):
        raise ReleaseError(f"--home {home!r} is no address; write https://host/path")
    uv = str(Path(sys.executable).with_name("uv"))
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as stage:
        source = with_home(home, Path(stage)) if home else ROOT
        _say("wheel and source archive")
        _run(uv, "build", "--quiet", "--no-create-gitignore", "--out-dir", folder, source)
        for chart in CHARTS:
            _say(f"chart {chart}")
            package(chart, folder, source=source)
    cluster_wide = [path.read_text() for path in sorted((ROOT / "deploy" / "crds").glob("*.yaml"))]
    (folder / f"prefix-gateway-crds-{version()}.yaml").write_text("---\n".join(cluster_wide))
    for image, requirements in IMAGES.items():
        _say(f"bill of materials of {image}")
        quiet = ("env", "PYTHONWARNINGS=ignore")  # the tool warns of what its reader cannot change
        tool = (uv, "tool", "run", "--quiet", "--from", _SBOM_TOOL, "cyclonedx-py")
        _run(
            *(*quiet, *tool, "requirements", ROOT / "requirements" / requirements, "--output-reproducible"),
            *("--pyproject", ROOT / "pyproject.toml", "--output-file", folder / f"{image}.cdx.json"),
        )
        if engine:
            _say(f"image {image} (some minutes the first time)")
            _image(engine, image, folder, flags=flags)
    sums = checksums(folder)
    if key:
        _say("signature")
        _run("gpg", "--batch", "--local-user", key, "--detach-sign", "--armor", sums)


def _image(engine: Sequence[str], image: str, folder: Path, *, flags: Sequence[str]) -> None:
    tag, saved = f"prefix-gateway-{image}:{version()}", folder / f"image-{image}-{version()}.tar"
    file = ROOT / f"deploy/docker/{image}.Dockerfile"
    _run(*engine, "build", "-q", *flags, "-f", file, "-t", tag, ROOT)
    if Path(engine[0]).name == "buildah":
        _run(*engine, "push", "-q", tag, f"docker-archive:{saved}:{tag}")
    else:
        _run(*engine, "save", "-o", saved, tag)


def _run(*command: str | Path) -> None:
    if shutil.which(str(command[0])) is None:
        raise ReleaseError(f"{command[0]} is missing: install it")
    ran = subprocess.run(command, cwd=ROOT, check=False)
    if ran.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))} ended with status {ran.returncode}")


def _say(what: str) -> None:
    print(f"release: {what}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    parser.add_argument(
        "--into", type=Path, default=ROOT / "dist", help="the folder above that of the version"
    )
    parser.add_argument("--engine", default="", help="docker, podman or buildah; empty: build no images")
    parser.add_argument("--build-flags", default="", help="the engine's options for each build")
    parser.add_argument("--key", default="", help="the GPG key that signs the checksums; empty: no signature")
    parser.add_argument(
        "--home", default="", help="https://... of the project, for wheel and charts; empty: none"
    )
    args = parser.parse_args()
    try:
        folder = args.into / version()
        build(
            folder,
            engine=args.engine.split(),
            key=args.key,
            home=args.home,
            flags=args.build_flags.split(),
        )
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    _say(f"done: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
