"""The errors that Envoy makes itself, as clients of OpenAI's and of Anthropic's API read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from epp.base.errors import DETAILS, BlockedPathError, BodyTooLargeError
from epp.serve.envoy.error_replies import as_json

MAPPERS: list[Mapping[str, Any]] = as_json()["mappers"]


def status_of(mapper: Mapping[str, Any]) -> tuple[str, int]:
    comparison = mapper["filter"]["status_code_filter"]["comparison"]
    return comparison["op"], comparison["value"]["default_value"]


def errors() -> dict[int, Mapping[str, Any]]:
    """Return the error object of each status that has one of its own."""
    named = [mapper for mapper in MAPPERS if "status_code_filter" in mapper["filter"]]
    return {
        status: mapper["body_format_override"]["json_format"]["error"]
        for mapper in named
        for op, status in [status_of(mapper)]
        if op == "EQ"
    }


def test_the_first_rule_passes_the_pickers_own_answers_unchanged() -> None:
    first = MAPPERS[0]
    expression = first["filter"]["extension_filter"]["typed_config"]["expression"]
    assert expression == f"response.code_details.startsWith('{DETAILS}')"
    assert list(first) == ["filter"], "nothing is replaced"


def test_the_last_rule_gives_every_other_error_a_general_text() -> None:
    assert status_of(MAPPERS[-1]) == ("GE", 400)


@pytest.mark.parametrize("status", sorted(errors()))
def test_each_error_has_the_fields_that_clients_read(status: int) -> None:
    error = errors()[status]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] is None
    assert all(error[name] for name in ("message", "type", "code"))


def test_every_body_is_json_and_says_that_it_is_an_error() -> None:
    bodies = [mapper["body_format_override"] for mapper in MAPPERS if "body_format_override" in mapper]
    assert len(bodies) == len(MAPPERS) - 1
    for body in bodies:
        assert body["content_type"] == "application/json"
        assert body["json_format"]["type"] == "error"


def test_envoy_and_the_picker_give_the_same_code_for_the_same_fault() -> None:
    assert errors()[404]["code"] == BlockedPathError.reason
    assert errors()[413]["code"] == BodyTooLargeError.reason


def test_a_request_without_room_for_our_headers_gets_431() -> None:
    (mapper,) = [each for each in MAPPERS if each.get("status_code")]
    assert mapper["status_code"] == 431
    assert mapper["body_format_override"]["json_format"]["error"] == errors()[431]
