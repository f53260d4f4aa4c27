"""Files that the configuration names, and the errors that name their field."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.config.named_files import read_file, read_secret
from epp.errors import ConfigError


def test_a_relative_path_that_is_not_there_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read_file("away.yaml", field="policyFile")
    assert str(caught.value) == f"policyFile: away.yaml: No such file or directory, looked for in {tmp_path}"


def test_an_absolute_path_stands_for_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_file(str(tmp_path), field="policyFile")
    assert str(caught.value) == f"policyFile: {tmp_path}: Is a directory"


def test_the_space_around_a_secret_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"  sixteen bytes!!! \n")
    assert read_secret(str(file), field="f") == b"sixteen bytes!!!"


@pytest.mark.parametrize(("content", "size"), [(b"", 0), (b"  fifteen bytes!! \n", 15)])
def test_a_secret_that_can_be_guessed_is_refused(tmp_path: Path, content: bytes, size: int) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^f: {file}: holds {size} bytes; a secret that nobody can guess"):
        read_secret(str(file), field="f")
