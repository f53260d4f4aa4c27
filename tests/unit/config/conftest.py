from pathlib import Path

import pytest


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The place of a configuration file that is not written yet."""
    return tmp_path / "epp.yaml"
