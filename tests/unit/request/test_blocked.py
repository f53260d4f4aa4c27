"""Which paths are refused, and that the check is cheap. For the list itself see
tests/contract/test_blocked_paths.py. Names and addresses from requests have a bounded length. Ids of
stored responses, conversations, files and batches in paths and bodies.
"""

import json
from typing import Any

import pytest

from epp.config.policy import PolicySpec
from epp.protocol.asking import read_head
from epp.request.blocked import BlockedPaths
from epp.request.client_names import MAX_NAME_CHARS, bounded_name, id_in_path, is_digest, makes_state
from epp.request.parse import API_PATHS, parse_request, skim_request

BLOCKED = BlockedPaths(("/metrics", "/inference/v1/abort_requests"))


@pytest.mark.parametrize(
    "target",
    ["", "*", "/", "/metri", "/v1/metrics", "/v1/models/a%20b", "/x?/../metrics", "/x?a=/metrics", "/inference/v1/generate", "/../x",
     "/." + "a" * 2046, "/" + "a" * 100_000, "/x?" + "a" * 100_000, "/v1/models/%zz%", "http://metrics/v1"],
)  # fmt: skip
def test_other_paths_are_not_refused(target: str) -> None:
    assert not BLOCKED.refuse(target)


@pytest.mark.parametrize("prefix", ["/v1/embeddings", "/V1/Chat", "/v1", "/"])
def test_a_path_of_an_api_is_allowed_unless_it_is_blocked(prefix: str) -> None:
    blocked = BlockedPaths((prefix,))
    assert blocked.open_apis < API_PATHS
    assert {path for path in API_PATHS if not blocked.refuse(path)} == blocked.open_apis


def test_an_empty_list_refuses_nothing() -> None:
    assert not any(BlockedPaths(()).refuse(target) for target in ("/metrics", "/%6d", "/." + "a" * 5_000))


LONG = "m" * (MAX_NAME_CHARS + 1)


def test_a_name_that_a_server_may_have_stays_as_it_is() -> None:
    name = "m" * MAX_NAME_CHARS
    assert bounded_name(name) == name
    assert not is_digest(name)


@pytest.mark.parametrize("name", [LONG, LONG * 1000, "\udcff" * 5000, "é" * 2000])
def test_a_longer_name_becomes_a_digest_of_fixed_length(name: str) -> None:
    assert len(bounded_name(name)) == MAX_NAME_CHARS + 1
    assert is_digest(bounded_name(name))
    assert bounded_name(name) == bounded_name(name)
    assert bounded_name(name + "x") != bounded_name(name)


def test_names_from_bodies_and_headers_are_bounded_when_they_are_read() -> None:
    body = {"model": LONG * 9, "cache_salt": LONG * 9, "prompt": "hi", "stream": True}
    read = parse_request("/v1/completions", json.dumps(body).encode())
    other = parse_request("/v1/rerank", json.dumps(body).encode())
    head = read_head([("x-session-id", LONG * 9)], PolicySpec())
    for name in (read.model, read.cache_salt, head.session):
        assert is_digest(name)
    assert not other.model


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/responses/resp_1?stream=true", "resp_1"),
        ("/v1/responses/resp_1/cancel", "resp_1"),
        ("/team/a/v1/files/file-9/content", "file-9"),
        ("/v1/conversations/conv_2/items", "conv_2"),
        ("/v1/batches/batch_3", "batch_3"),
        ("/v1/responses", ""),
        ("/v1/responses/", ""),
        ("/v1/responses/render", ""),
        ("/v1/responses/input_tokens?a=b", ""),
        ("/a/b/c/d/e/v1/responses/resp_1", ""),
        ("", ""),
    ],
)
def test_an_id_stands_behind_its_collection(path: str, name: str) -> None:
    assert id_in_path(path) == name


def test_only_posts_to_a_collection_make_something_with_an_id() -> None:
    made = ("/v1/responses", "/x/v1/files/?a=b", "/v1/responses/resp_1/cancel", "/v1/completions")
    assert [makes_state(path) for path in made] == [True, True, False, False]


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, "resp_1"),
        ("/v1/responses", {"input": "a", "conversation": "conv_1"}, "conv_1"),
        ("/v1/responses", {"input": "a", "conversation": {"id": "conv_1"}}, "conv_1"),
        ("/v1/responses", {"input": "a", "conversation": {"id": 7}, "previous_response_id": None}, ""),
        ("/v1/responses/input_tokens", {"input": "a", "previous_response_id": "resp_1"}, "resp_1"),
        ("/v1/files", [], ""),
    ],
)
def test_the_id_that_a_body_names_is_read(path: str, body: Any, name: str) -> None:
    assert parse_request(path, json.dumps(body).encode()).names_state == name


def test_a_long_id_is_bounded() -> None:
    asked = parse_request("/v1/responses", json.dumps({"previous_response_id": "x" * 10**6}).encode())
    assert len(asked.names_state) == len(id_in_path("/v1/responses/" + "x" * 10**6)) == 1025


@pytest.mark.parametrize(("store", "stores"), [(None, True), (True, True), (False, False)])
def test_a_client_may_ask_that_nothing_is_kept(store: object, *, stores: bool) -> None:
    asked = parse_request("/v1/responses", json.dumps({"input": "a", "store": store}).encode())
    assert asked.stores is stores


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/responses", "previous_response_id"),
        ("/v1/responses", "conversation"),
        ("/v1/batches", "input_file_id"),
        ("/v1/completions", ""),
    ],
)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("value", ["resp_1", {"id": "resp_1"}])
def test_the_id_in_a_body_that_is_not_read_is_found(path: str, field: str, value: Any, *, last: bool) -> None:
    named = {field or "previous_response_id": value}
    body = {"input": [{"image_url": "A" * 9_000_000, "conversation": "conv_2"}], "model": "m"}
    asked = parse_request(path, json.dumps(body | named if last else named | body).encode())
    assert (asked.model, asked.names_state) == ("m", "resp_1" if field else "")
    assert asked.unread == ("" if path == "/v1/batches" else "costly_body"), "nothing else is read of a batch"


def test_an_id_that_is_nested_deeply_is_no_id() -> None:
    nested = b"[" * 3000 + b"]" * 3000
    assert not parse_request("/v1/batches", b'{"input_file_id":{"id":%s}}' % nested).names_state


@pytest.mark.parametrize("path", ["/v1/files", "/v1/audio/transcriptions"])
@pytest.mark.parametrize("start", [b"--x\r\n", b"", b"\xff"])
def test_an_upload_is_not_weighed(path: str, start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording has so many quotes and escapes that weighing it would hold the loop for long."""
    monkeypatch.setattr("epp.request.jsontext.weigh", None)
    field = b'content-disposition: form-data; name="model"\r\n\r\nm\r\n--x'
    upload = start + field + b'\0"\\' * 1_000_000
    for asked in (parse_request(path, upload), skim_request(path, upload, unread="overload")):
        assert (asked.model, any(asked.media)) == ("m" if start == b"--x\r\n" else "", True)
