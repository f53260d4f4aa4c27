"""The descriptions of fields, which are read from the source of their classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

from epp.config.policy import PolicySpec
from epp.config.settings import Config
from tests.reference.schema import definitions


def fields(root: type[msgspec.Struct]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, section in definitions(root).items():
        for field, schema in section["properties"].items():
            yield f"{name}.{field}", schema


@pytest.mark.parametrize("root", [Config, PolicySpec])
def test_every_field_that_people_write_has_a_description(root: type[msgspec.Struct]) -> None:
    """A field that holds a section is described by the docstring of the section."""
    bare = [
        name for name, schema in fields(root) if not schema.get("description") and "$ref" not in str(schema)
    ]
    assert bare == []
