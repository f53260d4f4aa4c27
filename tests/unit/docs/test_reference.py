"""The reference pages in docs, and the files of the chart, are what the code generates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reference.pages import PAGES, PLACES

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_committed_page_equals_the_generated_page(page: str) -> None:
    assert (REPOSITORY / PLACES[page]).read_text() == PAGES[page](), "run `make docs`"
