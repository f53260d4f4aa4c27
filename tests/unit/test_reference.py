"""The reference pages in docs are what the code generates."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.reference import PAGES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_committed_page_is_the_generated_one(page: str) -> None:
    assert (DOCS / f"reference-{page}.md").read_text() == PAGES[page](), "run `make docs`"
