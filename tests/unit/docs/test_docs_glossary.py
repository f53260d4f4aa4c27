"""The glossary names modules that exist."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.unit.docs.pages import REPOSITORY

_NAMED = sorted(
    set(re.findall(r"`(epp(?:\.\w+)*)`", (REPOSITORY / "docs/glossary.md").read_text())) - {"epp"}
)


def test_the_glossary_names_modules() -> None:
    assert len(_NAMED) > 20


@pytest.mark.parametrize("name", _NAMED)
def test_a_module_that_the_glossary_names_exists(name: str) -> None:
    assert importlib.util.find_spec(name) is not None
