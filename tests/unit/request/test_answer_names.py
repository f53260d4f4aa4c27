"""The name of the model in an answer that is streamed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.request.answer_names import AnswerNames, readable

SERVED, ASKED = "llama-8b", "gpt"
EVENTS = (
    b'data: {"id":"1","object":"chat.completion.chunk","model":"llama-8b","choices":[{"delta":{"content":"a"}}]}\n\n'
    b'data: {"id":"1", "model": "llama-8b", "choices": [{"delta": {"content": "\\"model\\":\\"llama-8b\\""}}]}\n\n'
    b'data: {"model":"llama-8b-next"}\n\ndata: [DONE]\n\n'
)
RENAMED = (
    b'data: {"id":"1","object":"chat.completion.chunk","model":"gpt","choices":[{"delta":{"content":"a"}}]}\n\n'
    b'data: {"id":"1", "model": "gpt", "choices": [{"delta": {"content": "\\"model\\":\\"llama-8b\\""}}]}\n\n'
    b'data: {"model":"llama-8b-next"}\n\ndata: [DONE]\n\n'
)


@given(st.lists(st.integers(0, len(EVENTS)), max_size=12))
def test_answer_has_the_name_that_client_sent_however_its_bytes_are_split(cuts: list[int]) -> None:
    """Text that the model wrote is not a name, and neither is a longer name."""
    names = AnswerNames(served=SERVED, asked=ASKED)
    ends = [*sorted(cuts), len(EVENTS)]
    parts = [EVENTS[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    sent = [names.feed(part, end=n == len(parts) - 1) for n, part in enumerate(parts)]
    assert b"".join(sent) == RENAMED


def test_bytes_are_held_back_only_where_a_name_may_have_begun() -> None:
    names = AnswerNames(served=SERVED, asked=ASKED)
    assert names.feed(b'{"choices": [], "usage": {}', end=False) == b'{"choices": [], "usage": {}'
    assert names.feed(b', "model": "llama', end=False) == b", "
    assert names.feed(b'-70b"}', end=False) == b'"model": "llama-70b"}'
    assert names.feed(b'"mo', end=False) == b""
    assert names.feed(b"", end=True) == b'"mo', "the bytes that were held come at the end"


def test_names_with_quotes_and_backslashes_are_written_as_json() -> None:
    names = AnswerNames(served='a"b', asked="c\\d")
    body = json.dumps({"model": 'a"b'}).encode()
    assert json.loads(names.feed(body, end=True)) == {"model": "c\\d"}


@pytest.mark.parametrize(
    ("headers", "can"),
    [
        ({"content-type": "application/json"}, True),
        ({"content-type": "text/event-stream; charset=utf-8"}, True),
        ({"content-type": "application/json", "content-encoding": "gzip"}, False),
        ({"content-type": "audio/wav"}, False),
        ({}, False),
    ],
)
def test_only_plain_json_is_read(headers: dict[str, str], *, can: bool) -> None:
    assert readable(headers) is can
