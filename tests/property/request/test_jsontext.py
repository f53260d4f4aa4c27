"""The reader of JSON strings and token ids in C, compared with the decoder."""

import json
from array import array

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from epp.request._jsontext import text_of
from epp.request.jsontext import token_bytes

_ALPHABET = st.characters(codec="utf-8") | st.sampled_from(
    '"\\/\b\f\n\r\t\x00\x1f\x7f\x80\u07ff\u0800\uffff\U0001f600'
)
_PIECES = st.sampled_from(
    (
        *b'\\ " u n 00e9 D83D \\ud83d\\ude00 \\uDC00'.split(),
        b"plain ascii text, some bytes of it",
        *(b"\xc3\xa9", b"\xc0\x80", b"\xe2\x82\xac", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80"),
        *(b"\xf4\x90\x80\x80", b"\xff", b"\x80", b"\x1f", b"\n"),
    )
)


@given(text=st.text(_ALPHABET), ascii_only=st.booleans())
def test_the_text_of_a_json_string_is_its_utf8(*, text: str, ascii_only: bool) -> None:
    found = text_of(msgspec.Raw(json.dumps(text, ensure_ascii=ascii_only).encode()))
    assert found == text.encode()


@given(pieces=st.lists(_PIECES | st.binary(max_size=9), max_size=8))
@example(pieces=[b"12345678", b'"', b"12345678"])
@example(pieces=[b"1234567", b"\\"])
@example(pieces=[b"\\u12", b"x4"])
def test_text_is_read_as_the_decoder_reads_it_or_left_to_the_decoder(pieces: list[bytes]) -> None:
    token = b'"' + b"".join(pieces) + b'"'
    found = text_of(msgspec.Raw(token))
    try:
        decoded = msgspec.json.decode(token, type=str).encode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        decoded = None
    assert found in (None, decoded)


_NUMBERS = st.sampled_from(
    [b"0", b"12", b"4294967295", b"4294967296", b"-1", b"01", b"1.0", b"", b'"5"', b"[]", b"9" * 30]
)


@given(items=st.lists(_NUMBERS, max_size=4), between=st.sampled_from([b",", b" , ", b",,", b"\n,"]))
def test_token_ids_are_read_as_the_decoder_reads_them(items: list[bytes], between: bytes) -> None:
    value = msgspec.Raw(b"[" + between.join(items) + b"]")
    try:
        numbers = array("I", msgspec.json.decode(value, type=list[int]))
    except (msgspec.MsgspecError, OverflowError):
        with pytest.raises((msgspec.MsgspecError, OverflowError)):
            token_bytes(value)
    else:
        assert token_bytes(value) == numbers.tobytes()


@given(value=st.sampled_from([b"null", b"[]", b'["a"]', b"5", b"", b'"', b'"a']))
def test_values_that_are_not_strings_are_left_to_the_decoder(value: bytes) -> None:
    assert text_of(msgspec.Raw(value)) is None
