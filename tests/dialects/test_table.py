"""The table of gateways in docs/protocol.md, compared with the tests and with what the picker does."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from epp.config.dialects import DIALECTS
from tests.dialects.shapes import SHAPES

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"


def rows() -> dict[str, list[str]]:
    """Return the rows of the table of gateways in docs/protocol.md, by dialect."""
    section = DOCUMENT.read_text().partition("## Gateways")[2].partition("\n## ")[0]
    found = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row for row in found if len(row) == 6 and row[0] != "`dialect`"}


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_says_what_is_tested(name: str) -> None:
    row, shape = rows()[name], SHAPES[name]
    assert (row[4] == "list") == shape.reads_list == (DIALECTS[name].max_destinations > 1)
    assert ("full duplex" in row[2]) == shape.duplex
    assert set(rows()) == set(SHAPES) == set(DIALECTS)


def table(heading: str) -> Mapping[str, list[str]]:
    """Return the table whose second column has this heading: its other columns by dialect.
    `all but` names the dialects that are left out.
    """
    section = DOCUMENT.read_text().partition("## Gateways")[2].partition("\n## ")[0]
    lines = section.partition(f"| `dialect` | {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    found = {}
    for line in lines:
        who, *cells = line.strip("| ").split(" | ")
        named = set(re.findall("`([a-z-]+)`", who))
        for name in set(SHAPES) - named if who.startswith("all but") else named:
            assert name not in found, f"{name} has two lines"
            found[name] = cells
    assert set(found) == set(SHAPES)
    return found
