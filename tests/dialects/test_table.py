"""The table of gateways in docs/protocol.md, beside what is tested and what the picker does."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.config.dialects import DIALECTS
from tests.dialects.shapes import SHAPES

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"


def rows() -> dict[str, list[str]]:
    """Of the table of gateways in docs/protocol.md, by dialect."""
    section = DOCUMENT.read_text().partition("## Gateways")[2].partition("\n## ")[0]
    found = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row for row in found if len(row) == 6 and row[0] != "`dialect`"}


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_says_what_is_tested(name: str) -> None:
    row, shape = rows()[name], SHAPES[name]
    assert (row[4] == "list") == shape.reads_list == DIALECTS[name].reads_list
    assert ("full duplex" in row[2]) == shape.duplex
    assert set(rows()) == set(SHAPES) == set(DIALECTS)
