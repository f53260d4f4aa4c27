"""The body of a request: its API, its fields, and the reasons for which it is refused."""

import json
import struct
from typing import Any

import pytest

from epp.base.errors import BadRequestError
from epp.base.types import ApiKind, InferenceRequest, Media
from epp.request.parse import parse_request, skim_request
from epp.request.rewriting import with_model
from tests.unit.request.asked import CHAT, chat_prompt, parse

COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
MESSAGES = "/v1/messages"
KNOWN = (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS, MESSAGES)


def refusal(path: str, body: bytes) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        parse_request(path, body)
    return caught.value


# Which API


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", ApiKind.CHAT),
        ("/openai/v1/chat/completions?api-version=1", ApiKind.CHAT),
        ("/v1/chat/completions/", ApiKind.CHAT),
        ("/tenant/a/v1/messages", ApiKind.MESSAGES),
        ("/v1/messages/count_tokens", ApiKind.QUERY),
        ("/v1/responses/resp_1/cancel", ApiKind.QUERY),
        ("/v1/responses/compact", ApiKind.RESPONSES),
        ("/chat/completions", ApiKind.OTHER),
        ("/tokenize?next=/v1/chat/completions", ApiKind.QUERY),
    ],
)
def test_the_end_of_the_path_names_the_api(path: str, kind: ApiKind) -> None:
    body = b'{"model":"base","messages":[{"role":"user","content":"hi"}]}'
    request = parse_request(path, body)
    assert (request.kind, request.model) == (kind, "base")


@pytest.mark.parametrize("path", [*KNOWN, "/v1/models", ""])
def test_an_empty_body_has_no_api_and_is_not_an_error(path: str) -> None:
    assert parse_request(path, b"") == InferenceRequest(kind=ApiKind.OTHER)


@pytest.mark.parametrize(
    "body",
    [
        b"--form\r\n",
        b"\xff\xfe",
        b"[1]",
        b"7",
        b'{"model":5}',
        b'{"x":' + b"[" * 5000,
        b'{"model":"\\ud800"}',
        b"{",
        b"NaN",
    ],
)
def test_any_body_on_an_unknown_path_passes_without_a_model(body: bytes) -> None:
    read = parse_request("/v1/audio/transcriptions", body)
    assert (read.kind, read.model, read.prompt, read.unread) == (ApiKind.OTHER, "", b"", "")


# Only what no server can read is refused


@pytest.mark.parametrize("path", KNOWN)
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b" ",
        b'{"model":"m"} x',
        b"[]",
        b'"text"',
        b'{"model":"caf\xe9"}',
        b'{"model":"m","x":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"model":"m","x":' + b'{"a":' * 5_000,
    ],
)
def test_a_body_that_is_no_json_object_is_refused(path: str, body: bytes) -> None:
    fault = refusal(path, body)
    assert (fault.reason, fault.status) == ("bad_json", 400)


@pytest.mark.parametrize("path", KNOWN)
@pytest.mark.parametrize(
    "field",
    [
        '"temperature":NaN',
        r'"messages":[{"role":"user","content":"\ud83d"}],"prompt":"\ud83d","input":"\uDE00"',
        '"stream":"perhaps"',
        '"cache_salt":1',
        '"messages":"hi","prompt":{"a":1},"input":{"a":1}',
        '"messages":[5],"prompt":[true],"input":[5]',
        '"messages":[{"content":"x"}],"prompt":[1,"a"],"input":["a",[1]]',
        '"messages":[{"role":"user","content":5}],"prompt":[[1],[4294967296]],"input":[[1],[-1]]',
        '"messages":[{"role":"user","content":["a",5]}],"prompt":["a",5],"input":["a",5]',
    ],
)
def test_what_is_not_understood_goes_to_a_server_of_its_model(path: str, field: str) -> None:
    sent = f'{{"model":"m",{field}}}'.encode()
    read = parse_request(path, sent)
    assert (read.model, read.unread, read.prompt) == ("m", "not_understood", b"")


@pytest.mark.parametrize("path", KNOWN)
@pytest.mark.parametrize("model", ["", '"model":"",', '"model":null,', '"model":7,', '"model":["m"],'])
def test_a_body_without_a_model_has_its_prompt(path: str, model: str) -> None:
    fields = '"messages":[{"role":"user","content":"hi"}],"prompt":"hi","input":"hi"'
    read = parse_request(path, f"{{{model}{fields}}}".encode())
    assert (read.model, read.unread, read.prompt.endswith(b"hi")) == ("", "", True)


@pytest.mark.parametrize("path", KNOWN)
@pytest.mark.parametrize("value", ["", ',"FIELD":null', ',"FIELD":[]'])
def test_a_missing_or_empty_prompt_is_the_servers_to_judge(path: str, value: str) -> None:
    fields = "".join(value.replace("FIELD", name) for name in ("messages", "prompt", "input"))
    read = parse_request(path, f'{{"model":"m","max_tokens":-1{fields}}}'.encode())
    assert (read.prompt, read.unread, read.max_tokens) == (b"", "", None)


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/files"])
@pytest.mark.parametrize(
    "form",
    [
        b'--X\r\nContent-Disposition: form-data; name="model"\r\n\r\nasr\r\n--X--\r\n',
        b"--X\r\ncontent-disposition: form-data; name=model\r\ncontent-type: text/plain\r\n\r\nasr\r\n--X--",
        b'--X\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\n'
        + b"RIFF\r\n" * 20_000
        + b'\r\n--X\r\nContent-Disposition: form-data; name="model"\r\n\r\nasr\r\n--X--',
    ],
)
def test_the_model_of_a_form_is_read_and_can_be_replaced(path: str, form: bytes) -> None:
    read = parse_request(path, form)
    assert (read.model, read.media) == ("asr", Media(sound=1 + len(form) // 640))
    changed = with_model(form, model="speech-2")
    assert changed == form.replace(b"\r\n\r\nasr\r\n", b"\r\n\r\nspeech-2\r\n")


@pytest.mark.parametrize(
    "form",
    [
        b'--X\r\nContent-Disposition: form-data; name="language"\r\n\r\nen\r\n--X--',
        b'--X\r\nContent-Disposition: form-data; name="model"\r\n\r\n' + b"m" * 5000 + b"\r\n--X--",
        b'--X\r\ncontent-disposition: form-data; name="model"' * 3000,
    ],
)
def test_a_form_without_a_readable_model_goes_anywhere(form: bytes) -> None:
    assert parse_request("/v1/audio/transcriptions", form).model == ""


# JSON as it really arrives


@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", b" \r\n\t", b"\xef\xbb\xbf\n "])
def test_a_byte_order_mark_and_leading_white_space_do_no_harm(before: bytes) -> None:
    assert parse_request(COMPLETIONS, before + b'{"model":"m","prompt":"hi"}\n').prompt == b"hi"


def test_the_last_of_two_equal_keys_counts_as_in_the_model_servers() -> None:
    request = parse_request(COMPLETIONS, b'{"model":"a","prompt":"x","model":"b","prompt":"y"}')
    assert (request.model, request.prompt) == ("b", b"y")


def test_integers_of_any_length_are_accepted_in_fields_that_are_not_read() -> None:
    request = parse_request(COMPLETIONS, b'{"model":"m","prompt":"x","seed":' + b"9" * 6000 + b"}")
    assert request.prompt == b"x"


def test_an_integer_too_long_for_a_field_that_is_read_is_not_understood() -> None:
    read = parse_request(COMPLETIONS, b'{"model":"m","prompt":"x","max_tokens":' + b"9" * 6000 + b"}")
    assert read.unread == "not_understood"


def test_strings_that_look_like_other_values_stay_strings() -> None:
    assert chat_prompt("null") == b"\xffuser\xfenull"
    assert parse(COMPLETIONS, prompt=["5", "true"]).prompt == b"5"


# Fields beside the prompt


def test_fields_of_routing_are_read() -> None:
    request = parse(
        CHAT,
        messages=[{"role": "user", "content": "hi"}],
        cache_salt="tenant",
        stream=True,
        max_tokens=5,
        max_completion_tokens=7,
    )
    assert (request.cache_salt, request.stream, request.max_tokens) == ("tenant", True, 7)


@pytest.mark.parametrize(
    ("stream", "streams"), [(True, True), (1, True), ("false", False), (0, False), (None, False)]
)
def test_booleans_are_read_as_model_servers_read_them(stream: object, *, streams: bool) -> None:
    assert parse(COMPLETIONS, prompt="x", stream=stream).stream is streams


@pytest.mark.parametrize("salt", [{"extra_body": {"cache_salt": "x"}}, {"cache_salt": None}, {}])
def test_only_a_cache_salt_at_the_top_counts(salt: dict[str, Any]) -> None:
    assert parse(COMPLETIONS, prompt="x", **salt).cache_salt == ""


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (COMPLETIONS, {"prompt": "x", "max_tokens": 3}, 3),
        (COMPLETIONS, {"prompt": "x", "max_tokens": "16"}, 16),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 16.0}, 16),
        (COMPLETIONS, {"prompt": "x"}, None),
        (RESPONSES, {"input": "x", "max_output_tokens": 4, "max_tokens": 9}, 4),
        (MESSAGES, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}, 5),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 6}, 6),
    ],
)
def test_each_api_names_its_limit_of_tokens(path: str, body: dict[str, Any], expected: int | None) -> None:
    assert parse(path, **body).max_tokens == expected


# Completions and embeddings


@pytest.mark.parametrize("path", ["/generate", "/inference/v1/generate"])
@pytest.mark.parametrize("field", ["prompt", "text", "inputs", "input_ids", "token_ids"])
def test_the_servers_own_apis_have_prompts_too(path: str, field: str) -> None:
    sent: object = [1, 2] if field.endswith("ids") else "hi"
    read = parse_request(path, json.dumps({field: sent}).encode())
    assert read.prompt == (struct.pack("<2I", 1, 2) if field.endswith("ids") else b"hi")


@pytest.mark.parametrize(("path", "field"), [(COMPLETIONS, "prompt"), (EMBEDDINGS, "input")])
def test_a_batch_matches_its_first_prompt_and_counts_the_others(path: str, field: str) -> None:
    request = parse(path, **{field: ["first", "zwö", "x"]})
    assert (request.prompt, request.more_prompt_bytes, request.token_ids) == (b"first", 5, False)


@pytest.mark.parametrize(("path", "field"), [(COMPLETIONS, "prompt"), (EMBEDDINGS, "input")])
def test_token_ids_are_four_little_endian_bytes_each(path: str, field: str) -> None:
    request = parse(path, **{field: [1, 0, 2**32 - 1]})
    assert (request.prompt, request.more_prompt_bytes, request.token_ids) == (
        struct.pack("<3I", 1, 0, 2**32 - 1),
        0,
        True,
    )
    batch = parse(path, **{field: [[1], [2, 3]]})
    assert (batch.prompt, batch.more_prompt_bytes, batch.token_ids) == (struct.pack("<I", 1), 8, True)


def test_an_empty_string_is_a_prompt() -> None:
    assert parse(COMPLETIONS, prompt="").prompt == b""


def test_the_hash_of_prompt_embeds_takes_the_place_of_a_prompt() -> None:
    one, other = (parse(COMPLETIONS, prompt_embeds=data * 4000).prompt for data in ("a", "b"))
    assert one != other
    assert len(one) < 100
    assert parse(COMPLETIONS, prompt="text", prompt_embeds="a").prompt == b"text"


def test_embeddings_of_messages_render_as_a_chat() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert parse(EMBEDDINGS, messages=messages).prompt == parse(CHAT, messages=messages).prompt


@pytest.mark.parametrize(
    ("path", "fields", "shaped"),
    [
        ("/v1/chat/completions", {}, False),
        ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}, True),
        (COMPLETIONS, {"add_special_tokens": False}, True),
        (COMPLETIONS, {"reasoning_effort": "low"}, False),
        ("/v1/chat/completions", {"chat_template": None, "seed": 1}, False),
    ],
)
def test_fields_that_change_how_the_server_renders_the_prompt_are_seen(
    path: str, fields: dict[str, Any], *, shaped: bool
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", **fields}
    assert parse_request(path, json.dumps(body).encode()).shaped is shaped


@pytest.mark.parametrize("key", ['"model"', r'"\u006dodel"'])
def test_the_model_is_found_in_a_body_that_is_only_skimmed(key: str) -> None:
    body = f'{{"messages": 17, {key}: "llama"}}'.encode()
    seen = skim_request("/v1/chat/completions?a=b", body, unread="overload")
    assert (seen.kind, seen.model, seen.unread, seen.prompt) == (ApiKind.CHAT, "llama", "overload", b"")


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"model": "m", "prompt": "a fox"}, "/v1/completions"),
        ({"model": "m", "messages": [{"role": "user", "content": "a fox"}]}, "/v1/chat/completions"),
        ({"model": "m", "system": "s", "messages": [{"role": "user", "content": "a"}]}, "/v1/messages"),
        ({"model": "m", "input": "a fox"}, "/v1/responses"),
        ({"model": "m", "input": [{"role": "user", "content": "a fox"}]}, "/v1/responses"),
        ({"model": "m", "input": ["a fox", "a hen"]}, "/v1/embeddings"),
        ({"model": "m", "input": [1, 2, 3]}, "/v1/embeddings"),
        ({"model": "m", "input": "a fox", "dimensions": 64}, "/v1/embeddings"),
    ],
)
def test_without_a_path_the_fields_of_the_body_show_the_api(body: dict[str, object], path: str) -> None:
    sent = json.dumps(body).encode()
    assert parse_request("", sent) == parse_request(path, sent)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "messages": "text"}',
        b'{"model": "m", "query": "a fox"}',
        b"[1]",
        b"no json",
    ],
)
def test_without_a_path_a_body_that_fits_no_api_is_routed_and_not_refused(body: bytes) -> None:
    assert parse_request("", body).kind is ApiKind.OTHER
