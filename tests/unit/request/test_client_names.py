"""Names and addresses from requests have a bounded length."""

from __future__ import annotations

import json

import pytest

from epp.config.policy import PolicySpec
from epp.protocol.asking import read_head
from epp.request.client_names import MAX_NAME_CHARS, bounded_name, is_digest
from epp.request.parse import parse_request

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
    for name in (read.model, read.cache_salt, other.model, head.session):
        assert is_digest(name)
