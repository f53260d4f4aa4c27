"""Chats whose messages C reads in one pass. What C accepts, the ordinary decoder reads alike."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from epp.base.errors import BadRequestError
from epp.base.types import InferenceRequest
from epp.request.jsontext import too_costly
from epp.request.parse import COSTLY as COSTLY_BODY
from epp.request.parse import parse_request, plain_chat

PATH = "/v1/chat/completions"

_TEXT = st.text(st.characters(codec="utf-8") | st.sampled_from('"\\/\n\x7f\u00e9\U0001f600')) | st.just(
    "a" * 40
)
_ROLE = st.sampled_from(("system", "user", "assistant", "tool", "someone", "", "\u00e9"))
_SCALAR = st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats(allow_nan=False) | _TEXT
_MESSAGE = st.fixed_dictionaries({"role": _ROLE, "content": _TEXT}) | st.fixed_dictionaries(
    {"content": _TEXT | st.none() | st.lists(_SCALAR, max_size=2), "role": _ROLE}, optional={"name": _TEXT}
)
_BODY = st.fixed_dictionaries(
    {
        "model": st.sampled_from(("m", "org/model-7b", "", "\u00e9", "n" * 1025)),
        "messages": st.lists(_MESSAGE, max_size=4),
    },
    optional={
        "stream": st.booleans() | _SCALAR,
        "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans() | st.none()}),
        "max_tokens": st.integers(-1, 10**10) | _SCALAR,
        "max_completion_tokens": st.integers(0, 50) | st.none(),
        "temperature": _SCALAR,
        "stop": st.lists(_TEXT, max_size=2),
        "user": _TEXT,
        "tools": st.lists(st.fixed_dictionaries({"type": _TEXT, "x": _SCALAR}), max_size=2),
        "cache_salt": _TEXT,
        "priority": _SCALAR,
        "chat_template": _TEXT,
    },
)
_DAMAGE = st.sampled_from((
    b"", b'"', b"\\", b"\\u12", b"\\ud83d", b"\xff", b"\x00", b",", b"}", b"]", b"[", b"0", b"1e3", b" ", b"\xef\xbb\xbf",
))  # fmt: skip


def read(body: bytes) -> InferenceRequest | str:
    try:
        return parse_request(PATH, body)
    except BadRequestError as error:
        return error.reason


def same(body: bytes) -> None:
    """Read the body in both ways. A key with an escape makes C decline, and changes nothing else."""
    ordinary = body.replace(b'"messages"', b'"message\\u0073"')
    assert plain_chat(ordinary) is None
    assert read(body) == read(ordinary)


@given(body=_BODY, ascii_only=st.booleans(), indent=st.none() | st.just(1))
def test_a_plain_chat_is_read_as_the_ordinary_decoder_reads_it(
    *, body: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    same(json.dumps(body, ensure_ascii=ascii_only, indent=indent).encode())


@given(body=_BODY, at=st.floats(0, 1), damage=_DAMAGE, gone=st.integers(0, 4))
@example(body={"model": "m", "messages": [{"role": "user", "content": "a"}]}, at=1.0, damage=b" ", gone=0)
def test_a_damaged_chat_is_read_as_the_ordinary_decoder_reads_it(
    body: dict[str, Any], at: float, damage: bytes, gone: int
) -> None:
    whole = json.dumps(body).encode()
    place = round(at * len(whole))
    same(whole[:place] + damage + whole[place + gone :])


def test_the_usual_chat_is_read_in_c() -> None:
    body = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be br\u00e9f."},
            {"role": "user", "content": '"\n\U0001f600'},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 16,
        "temperature": 0.7,
        "seed": -1,
        "user": "somebody",
    }
    text = json.dumps(body).encode()
    assert plain_chat(text) is not None
    asked = parse_request(PATH, text)
    assert (asked.model, asked.stream, asked.max_tokens) == ("m", True, 16)
    assert asked.prompt == b'\xffsystem\xfeBe br\xc3\xa9f.\xffuser\xfe"\n\xf0\x9f\x98\x80'


COSTLY = (
    b'{"model":"m","messages":['
    + b'{"role":"user","content":"a"},' * 100_000
    + b'{"role":"user","content":""}]}',
    b'{"model":"m","messages":[{"role":"user","content":"' + b"\\n" * 1_000_000 + b'"}]}',
    b'{"model":"m","messages":[{"role":"user","content":"a"}]' + b',"x":1' * 400_000 + b"}",
    b'{"model":"m",' + b" " * 4_000_000 + b'"messages":[{"role":"user","content":"a"}]}',
    b'{"model":"m","messages":[{"role":"user","content":"' + b"a" * 9_000_000 + b'"}]}',
)


@pytest.mark.parametrize("body", COSTLY, ids=("messages", "escapes", "fields", "spaces", "long"))
def test_a_plain_chat_that_is_too_costly_is_left_unread(body: bytes) -> None:
    assert too_costly(body)
    assert parse_request(PATH, body).unread == COSTLY_BODY


FEW_BYTES_EACH = [b'"":1,', b'"a":1,', b'"":"",', b'"a":     1,', b'"abcdef":null,']


@pytest.mark.parametrize("field", FEW_BYTES_EACH)
def test_a_body_of_too_many_small_fields_is_left_unread(field: bytes) -> None:
    body = (
        b"{" + field * (7_900_000 // len(field)) + b'"model":"m","messages":[{"role":"user","content":"a"}]}'
    )
    assert parse_request(PATH, body).unread == COSTLY_BODY


REPEATED = [
    b'{"model":"m","messages":[{"role":"user","content":"a"}],"messages":[]}',
    b'{"model":"m","messages":[{"role":"user","content":"a"}],"messages":null}',
    b'{"model":"m","messages":[{"role":"user","content":"a"}],"m\\u0065ssages":[]}',
    b'{"model":"m","messages":[{"role":"user","content":"a"}],"message\\u0073":[{"role":"user","content":"b"}]}',
    b'{"model":"m","messages":[{"role":"user","content":"a","content":"b"}]}',
]


@pytest.mark.parametrize("twice", REPEATED)
def test_repeated_messages_are_left_to_the_ordinary_decoder(twice: bytes) -> None:
    assert plain_chat(twice) is None
