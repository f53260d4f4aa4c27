"""Files for Envoy are written only if they change, and never in part."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from epp.serve.envoy.replacing import write_if_changed


def test_an_equal_text_does_not_rewrite_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert write_if_changed(path, b"one")
    inode = path.stat().st_ino
    assert not write_if_changed(path, b"one")
    assert path.stat().st_ino == inode


def test_a_reader_keeps_the_old_text_until_it_opens_the_file_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_if_changed(path, b"one")
    with path.open("rb") as reader:
        assert write_if_changed(path, b"two")
        assert reader.read() == b"one"
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["file"], "nothing is left beside the file"  # noqa: PTH208 - hidden files too


def test_missing_folder_is_made_and_envoy_may_read_file_as_another_user(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    assert write_if_changed(path, b"one")
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_rename_that_fails_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_if_changed(path, b"one")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_if_changed(path, b"two")
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208 - hidden files too
