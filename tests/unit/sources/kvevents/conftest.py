from pathlib import Path

import pytest

from epp.sources.kvevents.language import FolderLanguage
from tests.unit.sources.kvevents.a_language import write_language


@pytest.fixture
def language(tmp_path: Path) -> FolderLanguage:
    return FolderLanguage(write_language(tmp_path))
