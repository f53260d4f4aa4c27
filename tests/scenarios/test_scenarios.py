"""The scenarios in `data/` show by examples how requests are routed and why.

`SCENARIOS_REWRITE=1` writes the real outputs into the files instead of comparing. Read the difference
before you keep it.
"""

import os
from pathlib import Path

import pytest

from tests.scenarios.interpreter import run

FILES = sorted((Path(__file__).parent / "data").glob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_scenario(file: Path) -> None:
    story = file.read_text()
    real = run(story)
    if os.environ.get("SCENARIOS_REWRITE") and real != story:
        file.write_text(real)
        pytest.fail(f"{file.name} was rewritten; read the difference")
    assert real == story


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 8
