"""The pictures of the pages are those that `make docs` would write."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from bench.drawing import PICTURES


@pytest.mark.parametrize("file", PICTURES, ids=lambda file: file.name)
def test_a_picture_is_as_fresh_as_its_source(file: Path) -> None:
    assert PICTURES[file]() == file.read_text(), "run `make docs`"
    ET.fromstring(file.read_text())
