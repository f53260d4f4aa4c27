"""Damaged bodies and answers give only typed errors, and an answer reads alike however it was split."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.base.errors import BadRequestError
from epp.base.types import ApiKind, InferenceRequest
from epp.request.parse import parse_request
from epp.request.response import ResponseFeedback, ResponseReader
from tests.fuzz.mutating import mutants
from tests.invariants.protocol import check_reader
from tests.unit.request.client_shapes import CHAT, RESPONSES, TURNS, sent

BYTE_MUTANTS = 8_000
ANSWER_MUTANTS = 2_000
EXAMPLES = 150

PIXEL = {"url": "data:image/png;base64,QUJD"}
COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"


# Answers

generated = st.lists(st.text(min_size=1, max_size=8), max_size=6)
NEWLINES = ("\n", "\r\n")


def answer_stream(kind: ApiKind, words: list[str], newline: str, *, multiline: bool) -> bytes:
    """Return what a server sends for these words, with usage, in one of the line endings that the standard
    allows.
    """
    events: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    ]
    usage: dict[str, Any] = {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    if kind is ApiKind.CHAT:
        events += [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in words]
        events += [{"choices": [], "usage": usage}]
    elif kind is ApiKind.COMPLETIONS:
        events += [{"choices": [{"index": 0, "text": word}]} for word in words] + [
            {"choices": [], "usage": usage}
        ]
    elif kind is ApiKind.RESPONSES:
        events += [{"type": "response.output_text.delta", "delta": word, "output_index": 0} for word in words]
        events += [{"type": "response.completed", "response": {"usage": usage}}]
    else:
        counts = {"input_tokens": 2, "cache_read_input_tokens": 5, "output_tokens": 1}
        events += [{"type": "message_start", "message": {"usage": counts}}]
        events += [
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}}
            for word in words
        ]
        events += [{"type": "message_delta", "usage": {"output_tokens": 2}}, {"type": "message_stop"}]
    lines: list[str] = []
    for number, value in enumerate(events):
        data = json.dumps(value, ensure_ascii=False, indent=1 if multiline else None).split("\n")
        lines += [f"event: e{number}", *(f"data: {line}" for line in data), ""]
    return newline.join([*lines, "data: [DONE]", "", ""]).encode()


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    kind=st.sampled_from([ApiKind.CHAT, ApiKind.COMPLETIONS, ApiKind.RESPONSES, ApiKind.MESSAGES]),
    words=generated,
    newline=st.sampled_from(NEWLINES),
    multiline=st.booleans(),
    data=st.data(),
)
def test_any_split_of_a_stream_gives_the_same_feedback(
    *, kind: ApiKind, words: list[str], newline: str, multiline: bool, data: st.DataObject
) -> None:
    stream = answer_stream(kind, words, newline, multiline=multiline)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    whole, split, bytewise = (
        read(kind, given_pieces) for given_pieces in ([stream], pieces, [bytes([b]) for b in stream])
    )
    assert whole == split == bytewise
    assert (whole.prompt_tokens, whole.cached_tokens, whole.completion_tokens) == (7, 5, 2)
    assert (whole.first_token_at is None) == (not words)


def read(kind: ApiKind, pieces: list[bytes], *, content_type: str = "text/event-stream") -> ResponseFeedback:
    reading = ResponseReader(kind=kind, content_type=content_type, content_encoding="")
    for piece in pieces:
        reading.feed(piece, now=1.0)
        check_reader(reading)
    return reading.finish()


# Mutants

COMMON = {
    "model": "m",
    "cache_salt": "s",
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 16,
}
VALID: list[tuple[str, bytes]] = [
    (path, json.dumps(body | COMMON).encode())
    for path, body in (
        *(sent(client, turns=2) for client in TURNS),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": PIXEL}]}]}),
        (COMPLETIONS, {"prompt": ["one", "two"]}),
        (COMPLETIONS, {"prompt": [[1, 2], [3, 4294967295]]}),
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
        (EMBEDDINGS, {"input": "text"}),
        (RESPONSES, {"input": "x", "previous_response_id": "p", "max_output_tokens": 9}),
        ("/tokenize", {"prompt": "x"}),
        ("/v1/rerank", {"query": "x"}),
    )
]
WORDS = (
    b'"model"',
    b'"type":',
    b'{"type":"tool_result","content":[' * 300,
    b'"content":',
    b"\\ud800",
    b"9" * 5000,
)


def outcome(path: str, body: bytes) -> str:
    """Return how the parser took the body. Any exception but BadRequestError fails the test."""
    try:
        request = parse_request(path, body)
    except BadRequestError as error:
        refused = error
    else:
        check_request(request)
        return request.unread or request.kind
    assert refused.reason == "bad_json"
    assert 0 < len(str(refused)) < 6000
    return refused.reason


def check_request(request: InferenceRequest) -> None:
    assert isinstance(request.model, str)
    assert request.more_prompt_bytes >= 0
    assert request.max_tokens is None or request.max_tokens >= 0
    assert not request.token_ids or len(request.prompt) % 4 == 0
    assert request.kind is not ApiKind.QUERY or request.prompt == b""


@pytest.mark.parametrize(("path", "body"), VALID)
def test_the_bodies_that_are_mutated_are_valid_to_begin_with(path: str, body: bytes) -> None:
    assert outcome(path, body) in set(ApiKind)


def test_mutated_bodies_raise_nothing_but_a_bad_request() -> None:
    rng = random.Random(20_000)
    makers = [(path, mutants(rng, [body], words=WORDS)) for path, body in VALID]
    seen: dict[str, int] = {}
    for number in range(BYTE_MUTANTS):
        path, damaged = makers[number % len(makers)]
        result = outcome(path, damaged() or b"{")
        seen[result] = seen.get(result, 0) + 1
    # The mutants pass the decoder: each kind survives some damage, and each sort of fault is found.
    assert set(seen) >= {*ApiKind, "bad_json", "not_understood"}
    assert seen["bad_json"] < BYTE_MUTANTS * 0.9


def test_mutated_answers_never_raise_and_read_alike_however_split() -> None:
    rng = random.Random(7)
    kinds = (ApiKind.CHAT, ApiKind.COMPLETIONS, ApiKind.RESPONSES, ApiKind.MESSAGES)
    makers = {
        kind: mutants(
            rng, [answer_stream(kind, ["Hé", "llo"], end, multiline=end == "\r\n") for end in NEWLINES]
        )
        for kind in kinds
    }
    for number in range(ANSWER_MUTANTS):
        kind = kinds[number % 4]
        stream = makers[kind]()
        cut = rng.randrange(len(stream) + 1)
        whole = read(kind, [stream])
        assert read(kind, [stream[:cut], stream[cut:]]) == whole
        read(kind, [stream], content_type="application/json")


@settings(max_examples=EXAMPLES, deadline=None)
@given(text=st.text(max_size=40), ascii_only=st.booleans())
def test_any_text_of_a_client_becomes_utf8(*, text: str, ascii_only: bool) -> None:
    body = json.dumps({"model": "m", "prompt": text}, ensure_ascii=ascii_only).encode()
    assert parse_request(COMPLETIONS, body).prompt == text.encode()
