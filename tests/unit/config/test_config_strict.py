"""The base of all sections, and the descriptions that are read from the source of their classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

from epp.config.policy import PolicySpec
from epp.config.settings import Config
from epp.config.strict import Ratio, Strict
from tests.reference.schema import definitions


class Inner(Strict, frozen=True):
    """A section."""

    share: Ratio = 0.5
    """The first line,
    and the second.
    """
    without_text: int = 0


class Outer(Strict, frozen=True):
    inner_part: Inner = Inner()
    """Text of the outer field."""


def test_the_text_below_a_field_is_its_description_in_one_line() -> None:
    found = definitions(Outer)
    assert found["Inner"]["properties"]["share"]["description"] == "The first line, and the second."
    assert "description" not in found["Inner"]["properties"]["withoutText"]
    assert found["Outer"]["properties"]["innerPart"]["description"] == "Text of the outer field."


def test_names_are_in_camel_case_and_others_are_refused() -> None:
    assert msgspec.convert({"innerPart": {"withoutText": 3}}, type=Outer).inner_part.without_text == 3
    for name in ("inner_part", "innerpart", "other"):
        with pytest.raises(msgspec.ValidationError, match=name):
            msgspec.convert({name: {}}, type=Outer)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_ratio_is_between_0_and_1(value: float) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"share": value}, type=Inner)


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
