"""Damaged bodies and answers give only typed errors, and an answer reads alike however it was split."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epp.base.errors import BadRequestError
from epp.base.types import ApiKind, InferenceRequest
from epp.request.parse import parse_request
from epp.request.response import ResponseFeedback, ResponseReader

BYTE_MUTANTS = 8_000
HYPOTHESIS_MUTANTS = 2_000
EXAMPLES = 150

CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS, MESSAGES = PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/messages",
)


# Answers

generated = st.lists(st.text(min_size=1, max_size=8), max_size=6)
newlines = st.sampled_from(["\n", "\r\n", "\r"])


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
    newline=newlines,
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
        reading.check_integrity()
    return reading.finish()


# Mutants

TOOL_TURN = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "é\ud800"},
            {"type": "image_url", "image_url": {"url": "data:;base64,QUJD"}},
        ],
    },
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "name": "f", "content": "42"},
]
ANTHROPIC_TURN = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1e5}}]},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "ok"}]}],
    },
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "function_call", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "ok"},
]
COMMON = {
    "model": "m",
    "cache_salt": "s",
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 16,
}
VALID: list[tuple[str, bytes]] = [
    (path, json.dumps(COMMON | body).encode())
    for path, body in (
        (CHAT, {"messages": TOOL_TURN, "tools": [{"function": {"name": "f"}}], "max_completion_tokens": 4}),
        (COMPLETIONS, {"prompt": ["one", "two"]}),
        (COMPLETIONS, {"prompt": [[1, 2], [3, 4294967295]]}),
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
        (EMBEDDINGS, {"input": "text"}),
        (
            RESPONSES,
            {"input": ITEMS, "instructions": "i", "previous_response_id": "p", "max_output_tokens": 9},
        ),
        (
            MESSAGES,
            {"messages": ANTHROPIC_TURN, "system": [{"type": "text", "text": "s"}], "tools": [{"name": "f"}]},
        ),
        ("/tokenize", {"prompt": "x"}),
    )
]
TOKENS = [
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b'"',
        b"\\",
        b"\\ud800",
        b"\\udc00",
        b"\\u",
        b"null",
        b"true",
        b"NaN",
        b"-",
        b"1e999",
    ),
    *(
        b"4294967296",
        b"9" * 5000,
        b"\xff",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
        b"\0",
        b'"model"',
        b'"type":',
        b"[" * 2000,
        b'{"a":' * 2000,
    ),
    *(b'{"type":"tool_result","content":[' * 300, b'"content":', b"{}", b"[]", b'""', b"0.5", b"Infinity"),
]


def mutate(body: bytes, rng: random.Random) -> bytes:
    """Do one small damage: flip a bit, cut, insert, repeat a piece, swap two pieces, or replace a token."""
    at = rng.randrange(len(body) + 1)
    end = min(len(body), at + rng.randrange(1, 40))
    match rng.randrange(6):
        case 0:
            at = min(at, len(body) - 1)
            return body[:at] + bytes([body[at] ^ (1 << rng.randrange(8))]) + body[at + 1 :]
        case 1:
            return body[:at] + body[end:]
        case 2:
            return body[:at] + rng.choice(TOKENS) + body[at:]
        case 3:
            return body[:end] + body[at:end] * rng.randrange(1, 4) + body[end:]
        case 4:
            later = rng.randrange(end, len(body) + 1)
            until = min(len(body), later + rng.randrange(1, 40))
            return body[:at] + body[later:until] + body[end:later] + body[at:end] + body[until:]
        case _:
            target = rng.choice(
                [
                    b'"m"',
                    b"true",
                    b"16",
                    b"null",
                    b"[",
                    b"]",
                    b"{",
                    b"}",
                    b'"f"',
                    b'"text"',
                    b'"role"',
                    b'"user"',
                ]
            )
            return body.replace(target, rng.choice(TOKENS), rng.randrange(1, 3))


def outcome(path: str, body: bytes) -> str:
    """Return how the parser took the body. Any exception but BadRequestError fails the test."""
    try:
        request = parse_request(path, body)
    except BadRequestError as error:
        refused = error
    else:
        check_request(request)
        return request.kind
    assert refused.reason in {"bad_json", "bad_field", "no_model", "no_messages", "no_prompt", "no_input"}
    assert 0 < len(str(refused)) < 6000
    return refused.reason


def check_request(request: InferenceRequest) -> None:
    assert isinstance(request.model, str)
    assert request.more_prompt_bytes >= 0
    assert request.max_tokens is None or request.max_tokens >= 0
    assert not request.token_ids or len(request.prompt) % 4 == 0
    assert request.kind is not ApiKind.OTHER or request.prompt == b""


@pytest.mark.parametrize(("path", "body"), VALID)
def test_the_bodies_that_are_mutated_are_valid_to_begin_with(path: str, body: bytes) -> None:
    assert outcome(path, body) in set(ApiKind)


def test_mutated_bodies_raise_nothing_but_a_bad_request() -> None:
    rng = random.Random(20_000)
    seen: dict[str, int] = {}
    for number in range(BYTE_MUTANTS):
        path, body = VALID[number % len(VALID)]
        for _ in range(rng.randrange(1, 4)):
            body = mutate(body, rng) or b"{"
        result = outcome(path, body)
        seen[result] = seen.get(result, 0) + 1
    # The mutants pass the decoder: each kind survives some damage, and each sort of fault is found.
    assert set(seen) >= {*ApiKind, "bad_json", "bad_field", "no_model"}
    assert seen["bad_json"] < BYTE_MUTANTS * 0.9


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
KNOWN_FIELDS = (
    "model messages prompt input system tools instructions stream stream_options max_tokens cache_salt "
    "previous_response_id prompt_embeds max_completion_tokens max_output_tokens"
)
known_fields = st.sampled_from(KNOWN_FIELDS.split())
wild_messages = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "name", "type", "tool_calls", "output", "arguments"]),
        st.one_of(
            json_values,
            st.sampled_from(["user", "message", "function_call_output"]),
            st.lists(
                st.dictionaries(
                    st.sampled_from(["type", "text", "content", "input"]), json_values, max_size=3
                ),
                max_size=2,
            ),
        ),
        max_size=4,
    ),
    max_size=3,
)
wild_bodies = st.dictionaries(known_fields, st.one_of(json_values, wild_messages), max_size=6)


@pytest.mark.slow
@settings(max_examples=HYPOTHESIS_MUTANTS, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(path=st.sampled_from(PATHS), body=wild_bodies, named=st.booleans())
def test_any_json_in_known_fields_raises_nothing_but_a_bad_request(
    *, path: str, body: dict[str, Any], named: bool
) -> None:
    outcome(path, json.dumps(body | ({"model": "m"} if named else {})).encode())


def test_mutated_answers_never_raise_and_read_alike_however_split() -> None:
    rng = random.Random(7)
    for number in range(1500):
        kind = (ApiKind.CHAT, ApiKind.COMPLETIONS, ApiKind.RESPONSES, ApiKind.MESSAGES)[number % 4]
        stream = answer_stream(
            kind, ["Hé", "llo"], rng.choice(["\n", "\r\n", "\r"]), multiline=number % 3 == 0
        )
        for _ in range(rng.randrange(1, 4)):
            stream = mutate(stream, rng) or b"{"
        cut = rng.randrange(len(stream) + 1)
        whole = read(kind, [stream])
        assert read(kind, [stream[:cut], stream[cut:]]) == whole
        read(kind, [stream], content_type="application/json")


@settings(max_examples=EXAMPLES, deadline=None)
@given(text=st.text(st.characters(exclude_categories=()), max_size=40), ascii_only=st.booleans())
def test_any_text_of_a_client_becomes_utf8(*, text: str, ascii_only: bool) -> None:
    """Lone surrogates may come as escapes. Written raw, they are not UTF-8 and are refused."""
    body = json.dumps({"model": "m", "prompt": text}, ensure_ascii=ascii_only).encode(
        "utf-8", "surrogatepass"
    )
    if not ascii_only and any("\ud800" <= letter <= "\udfff" for letter in text):
        assert outcome(COMPLETIONS, body) == "bad_json"
        return
    # Two halves in a row become a pair when they are escaped. UTF-16 joins them in the same way.
    paired = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert parse_request(COMPLETIONS, body).prompt.decode().replace("\ufffd", "") == paired.replace(
        "\ufffd", ""
    )
