"""`traceparent` as W3C Trace Context, section 3.2, defines it, and whatever else a client may write there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.observe.tracing.traceparent import Parent, read_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("text", "sampled"),
    [(GOOD, True), (f"00-{TRACE}-{SPAN}-00", False), (f"00-{TRACE}-{SPAN}-03", True)],
)
def test_a_valid_header_names_trace_span_and_whether_the_trace_is_sampled(
    text: str, *, sampled: bool
) -> None:
    assert read_traceparent(text) == Parent(int(TRACE, 16), int(SPAN, 16), sampled)


def test_a_later_version_may_have_more_fields() -> None:
    assert read_traceparent(f"01-{TRACE}-{SPAN}-01-more") == read_traceparent(GOOD)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0x",
        f"{GOOD}-more",
        f"{GOOD},{GOOD}",
        f" {GOOD}",
        f"{GOOD}\n",
        f"01-{TRACE}-{SPAN}-01more",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
    ],
)
def test_an_invalid_header_is_ignored(text: str) -> None:
    assert read_traceparent(text) is None


@given(st.text() | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}.*", fullmatch=True))
def test_any_text_is_read_or_ignored(text: str) -> None:
    parent = read_traceparent(text)
    assert parent is None or (0 < parent.trace_id < 2**128 and 0 < parent.span_id < 2**64)
