"""The fields of a body that routing reads, and how strictly."""

from __future__ import annotations

import msgspec
import pytest

from epp.request.api_fields import (
    DECODE_API_FIELDS,
    DECODE_CHAT,
    DECODE_COMPLETIONS,
    DECODE_OTHER,
    DECODE_RESPONSES,
)
from epp.request.jsontext import NO_RAW


@pytest.mark.parametrize(("sent", "read"), [("16", 16), ("16.0", 16), ('"16"', 16), ("null", None)])
def test_numbers_are_read_as_model_servers_read_them(sent: str, read: int | None) -> None:
    assert DECODE_COMPLETIONS.decode(f'{{"max_tokens":{sent}}}').max_tokens == read
    assert DECODE_RESPONSES.decode(f'{{"max_output_tokens":{sent}}}').max_output_tokens == read


@pytest.mark.parametrize(("sent", "read"), [("true", True), ("1", True), ("0", False), ('"false"', False)])
def test_booleans_are_read_as_model_servers_read_them(sent: str, *, read: bool) -> None:
    assert DECODE_CHAT.decode(f'{{"stream":{sent}}}').stream is read


def test_a_field_that_is_not_decoded_stays_the_json_that_was_sent() -> None:
    chat = DECODE_CHAT.decode(b'{"model": {"x" : 1e400}, "tools":[ "\\u0041" ], "unknown":[1,2]}')
    assert (bytes(chat.model), bytes(chat.tools)) == (b'{"x" : 1e400}', b'[ "\\u0041" ]')
    assert chat.cache_salt is NO_RAW


def test_a_body_of_another_api_needs_no_known_field() -> None:
    assert DECODE_OTHER.decode(b'{"query":"foxes"}').model is NO_RAW
    with pytest.raises(msgspec.ValidationError):
        DECODE_OTHER.decode(b"[]")


def test_null_fields_that_show_an_api_differ_from_missing_fields() -> None:
    present = DECODE_API_FIELDS.decode(b'{"input":null,"dimensions":64}')
    assert (bytes(present.input), bytes(present.dimensions)) == (b"null", b"64")
    assert present.messages is NO_RAW
