"""Files that the configuration names, and the errors that name their field."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.base.errors import ConfigError
from epp.config.named_files import read_file, read_secret


def test_the_error_for_an_unreadable_file_names_field_path_and_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_file(str(tmp_path), field="policyFile")
    assert str(caught.value) == f"policyFile: {tmp_path}: Is a directory; correct the path"


def test_white_space_around_a_secret_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"  sixteen bytes!!! \n")
    assert read_secret(str(file), field="f") == b"sixteen bytes!!!"


@pytest.mark.parametrize(("content", "size"), [(b"", 0), (b"  fifteen bytes!! \n", 15)])
def test_a_secret_that_is_too_short_is_refused(tmp_path: Path, content: bytes, size: int) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^f: {file}: holds {size} bytes; a secret that nobody can guess"):
        read_secret(str(file), field="f")
