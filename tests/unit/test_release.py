"""`make release`: one version everywhere, and charts in forms that registries take."""

import hashlib
import json
import tarfile
import tomllib
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import pytest

from deploy import release


def test_the_package_both_charts_and_the_changelog_have_one_version() -> None:
    version = release.version()
    assert version == installed("prefix-gateway")
    assert f"## {version}" in (release.ROOT / "CHANGELOG.md").read_text()


def test_a_chart_with_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "chart_facts", lambda _: {"version": "9.9.9", "appVersion": "9.9.9"})
    with pytest.raises(release.ReleaseError, match=r"same version.*9\.9\.9"):
        release.version()


def test_a_version_is_built_once(tmp_path: Path) -> None:
    with pytest.raises(release.ReleaseError, match="exists"):
        release.build(tmp_path, engine=(), key="")


@pytest.mark.parametrize("chart", release.CHARTS)
def test_each_digest_of_a_charts_layout_is_that_of_its_blob(tmp_path: Path, chart: str) -> None:
    archive = release.package(chart, tmp_path)
    with tarfile.open(archive) as tar:
        assert f"{chart}/Chart.yaml" in tar.getnames()
    layout = archive.with_suffix(".oci")
    (described,) = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = json.loads(_blob(layout, described))
    assert json.loads(_blob(layout, manifest["config"]))["name"] == chart
    (layer,) = manifest["layers"]
    assert _blob(layout, layer) == archive.read_bytes()


def test_wheel_and_charts_name_the_home_that_the_release_is_given(tmp_path: Path) -> None:
    home = "https://models.example.com/gateway"
    source = release.with_home(home, tmp_path)
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Homepage"] == home
    for chart in release.CHARTS:
        facts: dict[str, Any] = dict(release.chart_facts(chart, source=source))
        assert (facts["home"], facts["sources"]) == (home, [home])
        assert not {"home", "sources"} & release.chart_facts(chart).keys(), "the repository names none"


def test_the_checksums_name_every_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"content")
    digest = hashlib.sha256(b"content").hexdigest()
    assert release.checksums(tmp_path).read_text() == f"{digest}  folder/file\n"


def _blob(layout: Path, described: dict[str, Any]) -> bytes:
    algorithm, _, name = described["digest"].partition(":")
    data: bytes = (layout / "blobs" / algorithm / name).read_bytes()
    assert hashlib.sha256(data).hexdigest() == name
    assert len(data) == described["size"]
    return data
