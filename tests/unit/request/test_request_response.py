"""What the picker reads from an answer: first token, usage and errors."""

import gzip
import json
import zlib
from typing import Any

import pytest

from epp.base.types import ApiKind
from epp.request.response import MAX_EVENT_BYTES, MOST_LINES, EventSplitter, ResponseFeedback, ResponseReader
from tests.invariants.protocol import check_reader, check_splitter

SSE = "text/event-stream; charset=utf-8"
EMPTY = ResponseFeedback()


def reader(kind: ApiKind = ApiKind.CHAT, *, content_type: str = SSE, encoding: str = "") -> ResponseReader:
    return ResponseReader(kind=kind, content_type=content_type, content_encoding=encoding)


def read(pieces: list[bytes], reading: ResponseReader) -> ResponseFeedback:
    """Feed one piece at each second from 1.0 on."""
    for number, piece in enumerate(pieces, start=1):
        reading.feed(piece, now=float(number))
        check_reader(reading)
    return reading.finish()


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def delta(index: int = 0, **fields: Any) -> bytes:
    return event({"choices": [{"index": index, "delta": fields}]})


def named(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + event({"type": kind, **fields})


USAGE = {"prompt_tokens": 90, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 64}}
DONE = b"data: [DONE]\n\n"


# Streams


def test_first_token_and_usage_of_a_chat_stream_are_read() -> None:
    pieces = [
        delta(role="assistant", content=""),
        delta(content="Hel"),
        delta(content="lo"),
        event({"choices": [], "usage": USAGE}),
        DONE,
    ]
    assert read(pieces, reader()) == ResponseFeedback(
        first_token_at=2.0,
        prompt_tokens=90,
        cached_tokens=64,
        completion_tokens=3,
        status=200,
    )


@pytest.mark.parametrize(
    "fields",
    [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}, {"refusal": "no"}],
)
def test_thinking_and_tool_calls_are_first_tokens(fields: dict[str, Any]) -> None:
    assert read([delta(role="assistant"), delta(**fields)], reader()).first_token_at == 2.0


def test_a_completion_stream_is_read() -> None:
    pieces = [
        event({"choices": [{"index": 0, "text": ""}]}),
        event({"choices": [{"index": 1, "text": "x"}, {"index": 0, "text": "yes"}], "usage": None}),
        event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}),
        DONE,
    ]
    assert read(pieces, reader(ApiKind.COMPLETIONS)) == ResponseFeedback(
        first_token_at=2.0, prompt_tokens=5, completion_tokens=1, status=200
    )


def test_a_responses_stream_is_read() -> None:
    text = "response.output_text.delta"
    pieces = [
        named("response.created", response={"usage": None}),
        named("response.reasoning_text.delta", delta="hm"),
        named(text, delta="Hel", output_index=1, content_index=0),
        named(text, delta="lo", output_index=1, content_index=0),
        named(text, delta="later", output_index=2, content_index=0),
        named(
            "response.completed",
            response={
                "usage": {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}
            },
        ),
    ]
    assert read(pieces, reader(ApiKind.RESPONSES)) == ResponseFeedback(
        first_token_at=2.0,
        prompt_tokens=9,
        cached_tokens=4,
        completion_tokens=2,
        status=200,
    )


def test_an_anthropic_stream_is_read_and_its_prompt_counted_in_three_parts() -> None:
    usage = {
        "input_tokens": 10,
        "cache_read_input_tokens": 64,
        "cache_creation_input_tokens": 6,
        "output_tokens": 1,
    }
    pieces = [
        named("message_start", message={"usage": usage}),
        named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        named("content_block_delta", index=0, delta={"type": "text_delta", "text": "Hello"}),
        named("content_block_delta", index=1, delta={"type": "text_delta", "text": "apart"}),
        named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 7}),
        named("message_stop"),
    ]
    assert read(pieces, reader(ApiKind.MESSAGES)) == ResponseFeedback(
        first_token_at=3.0,
        prompt_tokens=80,
        cached_tokens=64,
        completion_tokens=7,
        status=200,
    )


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_both_line_endings_comments_and_split_data_are_understood(newline: bytes) -> None:
    lines = [
        b"\xef\xbb\xbf: hello",
        b"retry: 3",
        b"",
        b'data:{"choices":[{"delta":',
        b'data: {"content":"hi"}}]}',
        b"",
        b"data: [DONE]",
        b"",
    ]
    feedback = read([newline.join(lines) + newline], reader())
    assert (feedback.first_token_at, feedback.status) == (1.0, 200)


def test_an_event_that_was_cut_is_no_first_token() -> None:
    assert read([delta(role="assistant"), b'data: {"choi'], reader()).first_token_at is None


def test_an_event_over_the_limit_is_skipped_and_the_next_event_is_read() -> None:
    huge = b"data: " + b"x" * MAX_EVENT_BYTES
    lines = (b"data: " + b"x" * (MAX_EVENT_BYTES // 2 + 1) + b"\n") * 2
    pieces = [huge, b"more\n", b"data: {}\n", b"\n", lines, b": note\n\n", delta(content="after")]
    assert read(pieces, reader()).first_token_at == 7.0


def test_a_stream_without_any_line_end_stays_small() -> None:
    reading = reader()
    for _ in range(40):
        reading.feed(b"y" * 65536, now=1.0)
        check_reader(reading)
    assert reading.finish() == EMPTY


@pytest.mark.parametrize(
    ("kind", "pieces", "status"),
    [
        (ApiKind.CHAT, [event({"error": {"message": "no", "code": 503}}), DONE], 503),
        (ApiKind.CHAT, [event({"object": "error", "code": 400, "message": "no"}), DONE], 400),
        (ApiKind.CHAT, [event({"error": {"type": "BadRequestError", "code": None}}), DONE], 400),
        (ApiKind.CHAT, [event({"error": "no"}), DONE], 500),
        (ApiKind.CHAT, [delta(content="a"), event({"error": {"code": "x"}}), DONE], 500),
        (
            ApiKind.RESPONSES,
            [named("response.failed", response={"status": "failed", "error": {"code": "x"}})],
            500,
        ),
        (ApiKind.RESPONSES, [named("error", code="server_error", message="no")], 500),
        (ApiKind.MESSAGES, [named("error", error={"type": "overloaded_error"})], 500),
        (ApiKind.MESSAGES, [named("error", error={"type": "invalid_request_error"})], 400),
        (ApiKind.CHAT, [event({"choices": [{"delta": {}, "finish_reason": "stop"}]}), DONE], 204),
        (ApiKind.CHAT, [delta(content="a")], 206),
        (ApiKind.CHAT, [delta(content="a"), DONE], 200),
        (ApiKind.CHAT, [delta(content="a"), DONE.rstrip()], 200),  # an end without its blank line
        (ApiKind.CHAT, [event({"choices": [{"delta": {"content": "x" * MAX_EVENT_BYTES}}]}), DONE], None),
        (ApiKind.CHAT, [event({"choices": [{}] * 30_000}), DONE], 200),
        (ApiKind.CHAT, [delta(role="assistant")], 206),
        (ApiKind.CHAT, [b": keep-alive\n\n"], 206),
        (ApiKind.CHAT, [event({"choices": [{"text": "", "token_ids": [7]}]}), DONE], 200),
        (ApiKind.CHAT, [delta(tool_calls=[{"index": 0}]), DONE], 200),
        (ApiKind.CHAT, [delta(reasoning_content="a"), DONE], 200),
    ],
)
def test_a_body_tells_of_an_error_or_that_it_ends_without_a_token(
    kind: ApiKind, pieces: list[bytes], status: int | None
) -> None:
    assert read(pieces, reader(kind)).status == status


# Plain JSON


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        (
            ApiKind.CHAT,
            {"choices": [{"message": {"content": "hi"}}], "usage": USAGE},
            ResponseFeedback(prompt_tokens=90, cached_tokens=64, completion_tokens=3, status=200),
        ),
        (
            ApiKind.EMBEDDINGS,
            {"data": [], "usage": {"prompt_tokens": 4}},
            ResponseFeedback(prompt_tokens=4, status=204),
        ),
        (
            ApiKind.RESPONSES,
            {
                "error": None,
                "output": [
                    {"type": "reasoning"},
                    {"type": "message", "content": [{"type": "output_text", "text": "a"}]},
                ],
                "usage": {"input_tokens": 4, "output_tokens": 1},
            },
            ResponseFeedback(prompt_tokens=4, completion_tokens=1, status=200),
        ),
        (
            ApiKind.MESSAGES,
            {
                "content": [
                    {"type": "thinking"},
                    {"type": "text", "text": "a"},
                    {"type": "text", "text": "b"},
                ],
                "usage": {"input_tokens": 4, "cache_read_input_tokens": None},
            },
            ResponseFeedback(prompt_tokens=4, status=200),
        ),
        (ApiKind.CHAT, {"error": {"message": "no"}}, ResponseFeedback(status=500)),
    ],
)
def test_plain_json_gives_usage_but_no_time(
    kind: ApiKind, body: dict[str, Any], expected: ResponseFeedback
) -> None:
    whole = json.dumps(body).encode()
    half = len(whole) // 2
    assert read([whole[:half], whole[half:]], reader(kind, content_type="application/json")) == expected


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        (ApiKind.CHAT, b"", 206),
        (ApiKind.CHAT, b"{}", 206),
        (ApiKind.CHAT, b'{"choices":[{"message":{"content":"a', 206),
        (ApiKind.CHAT, b"<html>busy</html>", 206),
        (ApiKind.CHAT, b'{"choices":[{"message":{"content":""},"finish_reason":"stop"}]}', 204),
        (ApiKind.CHAT, b'{"choices":[{"message":{"content":null,"tool_calls":[{"id":"a"}]}}]}', 200),
        (ApiKind.CHAT, b'{"choices":[{"message":{"content":null,"reasoning":"a"}}]}', 200),
        (ApiKind.COMPLETIONS, b'{"choices":[{"text":""}]}', 204),
        (
            ApiKind.COMPLETIONS,
            b'{"choices":[{"text":""}],"usage":{"completion_tokens":1}}',
            204,
        ),  # it ends it
        (ApiKind.COMPLETIONS, b'{"choices":[{"text":""}],"usage":{"completion_tokens":2}}', 200),
        (ApiKind.EMBEDDINGS, b'{"data":[{"embedding":[0.5]}]}', 200),
        (ApiKind.MESSAGES, b'{"type":"message","content":[]}', 204),
        (ApiKind.RESPONSES, b'{"output":[]}', 204),
        (ApiKind.RESPONSES, b'{"output":[],"status":"queued"}', None),
        (ApiKind.QUERY, b'{"status":"queued"}', None),
        (ApiKind.OTHER, b"", None),
    ],
)
def test_a_whole_answer_shows_if_it_lacks_a_token_or_its_end(kind: ApiKind, body: bytes, status: int) -> None:
    for content_type in ("application/json", *([] if body.startswith(b"{") else ["text/html", ""])):
        assert read([body], reader(kind, content_type=content_type)).status == status


def test_plain_json_over_the_limit_or_that_a_client_left_is_ignored() -> None:
    whole = json.dumps({"choices": [{"text": "a" * MAX_EVENT_BYTES}]}).encode()
    for piece, status in ((whole, None), (whole[:99], 206)):
        reading = reader(ApiKind.COMPLETIONS, content_type="application/json")
        assert read([piece], reading).status == status
        assert reading.finish(whole=False) == EMPTY


# Answers that are ignored


@pytest.mark.parametrize(
    ("kind", "content_type", "encoding"),
    [
        (ApiKind.CHAT, SSE, "gzip"),
        (ApiKind.RESPONSES, SSE, "gzip"),
        (ApiKind.CHAT, SSE, "br, identity"),
        (ApiKind.OTHER, SSE, ""),
        (ApiKind.EMBEDDINGS, SSE, ""),
    ],
)
def test_compressed_and_unknown_answers_teach_nothing(
    kind: ApiKind, content_type: str, encoding: str
) -> None:
    for piece in (delta(content="a"), gzip.compress(delta(content="a"))):
        assert read([piece], reader(kind, content_type=content_type, encoding=encoding)) == EMPTY


def test_an_identity_encoding_counts_as_no_encoding() -> None:
    reading = reader(content_type="TEXT/Event-Stream", encoding=" Identity")
    assert read([delta(content="a"), DONE], reading).status == 200


@pytest.mark.parametrize("kind", list(ApiKind))
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[1]",
        b"{",
        b"\xff\xfe",
        b'{"choices":5,"usage":5,"type":5,"output":{},"content":{}}',
        b'{"choices":[5,{"delta":5},{"delta":{"content":5}},{"text":{}},{"index":[],"text":"a"}]}',
        b'{"usage":{"prompt_tokens":-1,"completion_tokens":true,"input_tokens":"4","prompt_tokens_details":[]}}',
        b'{"type":"content_block_delta","delta":[]}',
        b'{"type":"content_block_delta","delta":{"type":"text_delta","text":[1]}}',
        b'{"type":"message_start","message":7}',
        b'{"type":"response.output_text.delta","delta":{"a":1}}',
        b"[" * 100_000,
    ],
)
def test_garbage_teaches_nothing_and_never_raises(kind: ApiKind, data: bytes) -> None:
    for content_type, body in ((SSE, b"data: " + data + b"\n\n"), ("application/json", data)):
        feedback = read([body], reader(kind, content_type=content_type))
        assert feedback.prompt_tokens is feedback.cached_tokens is feedback.completion_tokens is None


@pytest.mark.parametrize("number", ["9" * 400, "-1", "1e300", "12.0", "68719476737", "true", '"7"'])
def test_impossible_counts_are_ignored(number: str) -> None:
    """A sum of such numbers is too large for a float."""
    usage = f'{{"prompt_tokens":{number},"completion_tokens":{number},"prompt_tokens_details":{{"cached_tokens":{number}}}}}'
    feedback = read(
        [f'{{"choices":[],"usage":{usage}}}'.encode()],
        reader(ApiKind.CHAT, content_type="application/json"),
    )
    assert feedback == ResponseFeedback(status=204)


def test_an_event_with_too_many_empty_lines_is_skipped() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data:\n" * 175_000 + b"\ndata: a\n\n") == [b"a"]
    check_splitter(splitter)
    assert splitter.feed(b"data:\n" * 166 + b"\n") == [b"\n" * 165]


@pytest.mark.parametrize("size", [7, 100_000])
def test_an_answer_is_read_up_to_a_number_of_lines_in_any_pieces(size: int) -> None:
    body = b"x\n" * (MOST_LINES - 2) + delta(content="b") + event({"error": "unread"}) + DONE
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    assert read(pieces, reader()).status == 200


@pytest.mark.parametrize("kind", [ApiKind.RESPONSES, ApiKind.QUERY, ApiKind.CHAT])
def test_the_id_of_what_a_server_keeps_is_read_from_a_whole_answer(kind: ApiKind) -> None:
    small = json.dumps({"id": "resp_1", "output": []})
    many, large = (small.replace("[]", part) for part in ("[{}]" * 30_000, '"' + "a" * MAX_EVENT_BYTES + '"'))
    for answer in (small, many, large, small.replace('{"id"', ' {\n "id"')):
        for encoding, sent in (("", answer.encode()), ("gzip", gzip.compress(answer.encode()))):
            reading = reader(kind, content_type="application/json", encoding=encoding)
            made = [reading.feed(piece, now=1.0) for piece in (sent[:1], sent[1:])]
            assert "".join(made) + reading.finish().made == ("" if kind is ApiKind.CHAT else "resp_1")
    reading = reader(kind, content_type="application/json", encoding="gzip")
    read([gzip.compress(small.encode()), *[bytes(1000)] * 100], reading)
    assert not getattr(vars(reading)["_packed"], "unused_data", b""), "what follows the data is not kept"


@pytest.mark.parametrize("encoding", ["", "gzip"])
def test_the_id_of_a_streamed_response_is_read_from_its_first_event(encoding: str) -> None:
    for count in (0, 12_000):  # it repeats the tools of the request
        event = named("response.created", response={"id": "resp_1", "tools": [{}] * count})
        reading, ids, packer = reader(ApiKind.RESPONSES, encoding=encoding), [], zlib.compressobj(wbits=31)
        for piece in (named("other", id="x", item={"id": "y"}), event, named("response.completed"), event):
            packed = packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH)
            ids.append(reading.feed(packed if encoding else piece, now=1.0))
        assert (ids, reading.finish().made) == (["", "resp_1", "", ""], "")
