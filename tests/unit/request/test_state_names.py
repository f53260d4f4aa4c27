"""Ids of stored responses, conversations, files and batches in paths and bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from epp.request.client_names import id_in_path, makes_state
from epp.request.parse import parse_request


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/responses/resp_1", "resp_1"),
        ("/v1/responses/resp_1?stream=true", "resp_1"),
        ("/v1/responses/resp_1/cancel", "resp_1"),
        ("/team/a/v1/files/file-9/content", "file-9"),
        ("/v1/conversations/conv_2/items", "conv_2"),
        ("/v1/batches/batch_3", "batch_3"),
        ("/v1/responses", ""),
        ("/v1/responses/", ""),
        ("/v1/chat/completions", ""),
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
        ("/v1/batches", {"input_file_id": "file-1", "endpoint": "/v1/responses"}, "file-1"),
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
