"""How the load generator reads a streamed answer: its text, its tokens and their times."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.sse import Answer, AnswerError, read_answer


def event(content: str | None, **more: Any) -> bytes:
    choices = [] if content is None else [{"index": 0, "delta": {"content": content}, "finish_reason": None}]
    return f"data: {json.dumps({'choices': choices, **more})}\n\n".encode()


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
DONE = b"data: [DONE]\n\n"
USAGE = event(
    None, usage={"prompt_tokens": 90, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 64}}
)


def test_the_first_token_is_the_first_text_and_gaps_are_between_tokens() -> None:
    answer = read_answer(
        [(1.0, ROLE), (2.0, event("a")), (2.5, event("b")), (4.0, event("c")), (9.0, USAGE + DONE)]
    )
    assert answer == Answer(
        first_token_at=2.0,
        last_token_at=4.0,
        longest_gap_s=1.5,
        output_tokens=9,
        tokens_counted=True,
        prompt_tokens=90,
        cached_tokens=64,
        text="abc",
    )
    assert answer.inter_token_s == 2.0 / 8


def test_an_event_has_the_time_of_the_piece_that_ends_it() -> None:
    whole = event("a")
    answer = read_answer([(1.0, ROLE + whole[:20]), (3.0, whole[20:] + event("b") + DONE)])
    assert (answer.first_token_at, answer.last_token_at) == (3.0, 3.0)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_however_the_bytes_are_cut_the_answer_is_the_same(sizes: list[int]) -> None:
    body = ROLE + event("Grüße, ") + event("世界") + b": a comment\r\n\r\n" + USAGE + DONE
    pieces, position = [], 0
    for n, size in enumerate(sizes):
        pieces.append((float(n), body[position : position + size]))
        position += size
    pieces.append((float(len(sizes)), body[position:]))
    answer = read_answer([piece for piece in pieces if piece[1]])
    assert answer.text == "Grüße, 世界"
    assert (answer.output_tokens, answer.prompt_tokens, answer.cached_tokens) == (9, 90, 64)
    assert answer.first_token_at <= answer.last_token_at


def test_without_usage_events_are_counted_as_tokens_and_the_answer_says_so() -> None:
    answer = read_answer([(1.0, event("a") + event("b")), (2.0, event("c") + DONE)])
    assert (answer.output_tokens, answer.tokens_counted) == (3, False)


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    answer = read_answer([(1.0, event("a") + DONE)])
    assert answer.inter_token_s is None
    assert answer.longest_gap_s == 0.0


def test_completions_reasoning_and_tool_calls_also_count_as_tokens() -> None:
    for choice in (
        {"text": "a"},
        {"delta": {"reasoning_content": "hm"}},
        {"delta": {"content": None, "tool_calls": [{"index": 0}]}},
    ):
        piece = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
        assert read_answer([(1.0, piece), (2.0, DONE)]).first_token_at == 1.0


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (ROLE + event("a"), "cut"),
        (ROLE + event("a")[:-30], "cut"),
        (b"", "cut"),
        (ROLE + DONE, "malformed"),
        (b"data: {nonsense}\n\n" + DONE, "malformed"),
        (b'data: {"choices": 3}\n\n' + DONE, "malformed"),
        (event("a") + b'data: {"error": {"message": "out of memory"}}\n\n', "error event"),
    ],
)
def test_an_incomplete_answer_is_an_error_with_its_class(body: bytes, kind: str) -> None:
    with pytest.raises(AnswerError) as caught:
        read_answer([(1.0, body)] if body else [])
    assert caught.value.kind == kind
