"""The attributes of a span: what a decision knows, and nothing that is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.base.types import EndpointName
from epp.observe.tracing.tracer import attributes_of, error_of
from tests.unit.observe.telemetry.records import HERE, THERE, decision

PAGE = Path("docs/tracing.md").read_text()


def test_unknown_values_are_left_out() -> None:
    found = attributes_of(decision(model=""))
    assert (found["server.address"], found["server.port"]) == (HERE.host, HERE.port)
    assert not {"gen_ai.request.model", "http.response.status_code", "error.type"} & found.keys()
    assert "prefix_gateway.first_token_seconds" not in found
    assert all(value is not None for value in found.values())


@pytest.mark.parametrize(
    ("kind", "operation"),
    [("chat", "chat"), ("completions", "text_completion"), ("embeddings", "embeddings"), ("score", "score")],
)
def test_the_operation_has_the_name_of_the_conventions_or_else_our_own(kind: str, operation: str) -> None:
    told = decision()
    told.kind = kind
    assert attributes_of(told)["gen_ai.operation.name"] == operation


@pytest.mark.parametrize(
    ("status", "outcome", "error"),
    [
        (200, "ended", ""),
        (404, "ended", ""),
        (500, "ended", "500"),
        (None, "failed", "failed"),
        (200, "aborted", ""),
    ],
)
def test_only_faults_of_servers_are_errors(status: int | None, outcome: str, error: str) -> None:
    told = decision()
    told.status, told.outcome = status, outcome
    assert error_of(told) == error


def test_every_attribute_is_documented() -> None:
    told = decision(adapter="sql")
    told.served, told.served_by, told.status, told.outcome = THERE, EndpointName("other"), 503, "failed"
    told.headers_s, told.ttft_s, told.cached_tokens, told.unread = 0.1, 0.2, 5, "encoded_body"
    names = attributes_of(told).keys()
    # The page shortens a second name of a row to its last part.
    shown = {
        name for name in names if f"`{name}`" in PAGE or f"`.{name.removeprefix('prefix_gateway.')}`" in PAGE
    }
    assert names - shown == set()
