"""The generated reference pages, picture of the layers and files of the chart are up to date."""

import importlib.util
import re
from xml.etree import ElementTree as ET

import pytest

from bench.drawing import FILE, architecture
from tests.reference.pages import PAGES, PLACES
from tests.unit.docs.pages import REPOSITORY


@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_committed_page_equals_the_generated_page(page: str) -> None:
    assert (REPOSITORY / PLACES[page]).read_text() == PAGES[page](), "run `make docs`"


def test_a_picture_is_as_fresh_as_its_source() -> None:
    assert architecture() == FILE.read_text(), "run `make docs`"
    ET.fromstring(FILE.read_text())


def test_the_glossary_names_modules_that_exist() -> None:
    named = set(re.findall(r"`(epp(?:\.\w+)*)`", (REPOSITORY / "docs/glossary.md").read_text())) - {"epp"}
    assert len(named) > 20
    assert [name for name in sorted(named) if importlib.util.find_spec(name) is None] == []
