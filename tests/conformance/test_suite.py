"""The reference page names a proof for each row."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "protocol.md"


def test_the_reference_page_has_every_row_and_names_what_exists() -> None:
    lines = re.findall(r"^\| (\d+) \| (.+?) \| (.+) \| (.+?) \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert [int(number) for number, *_ in lines] == list(range(1, 20))
    tests = {
        name
        for path in ROOT.glob("tests/**/test_*.py")
        for name in re.findall(r"def test_(?:row_\d\d_)?(\w+)", path.read_text())
    }
    for number, _, _, proof in lines:
        named = re.findall(r"`(\w+)`", proof)
        assert named, f"row {number} names no proof"
        assert [part for part in named if part not in tests] == []
