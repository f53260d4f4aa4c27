"""Sends the 400 for a body with broken framing to the client without asking the picker.

Envoy makes a 400, passes it to its filters, and closes the connection at once. The filter of the external
processor would hold the 400 until the picker has seen it, so the client would get nothing. If a filter
replaces a response that has begun with an answer of its own, Envoy sends this answer directly, without the
other filters. The custom response filter does this here, before the filter of the external processor sees the
400. Pure. `client_listener` calls this module.
"""

from __future__ import annotations

from typing import Any, Final

from epp.serve.envoy.messages import Message, extension, typed

_HEADER: Final = "connection"
_VALUE: Final = "close"

MARK: Final[Message] = {"header": {"key": _HEADER, "value": _VALUE}}
"""A header of the 400 that Envoy makes, which distinguishes it from the picker's own 400. Envoy replaces this
header when it writes the answer."""


def replies() -> Message:
    """Return the filter. It stands after the external processor in the list, because filters see answers from
    last to first.
    """
    envoys_own = _is("true", "HttpResponseLocalReplyMatchInput")
    marked = _is(_VALUE, "HttpResponseHeaderMatchInput", header_name=_HEADER)
    again = typed(
        "extensions.http.custom_response.local_response_policy.v3.LocalResponsePolicy", status_code=400
    )
    rule = {
        "predicate": {"and_matcher": {"predicate": [envoys_own, marked]}},
        "on_match": {"action": {"name": "again", "typed_config": again}},
    }
    return extension(
        "filters.http.custom_response",
        "extensions.filters.http.custom_response.v3.CustomResponse",
        custom_response_matcher={"matcher_list": {"matchers": [rule]}},
    )


def _is(value: str, kind: str, **what: Any) -> Message:
    answer = {"name": "answer", "typed_config": typed(f"type.matcher.v3.{kind}", **what)}
    return {"single_predicate": {"input": answer, "value_match": {"exact": value}}}
