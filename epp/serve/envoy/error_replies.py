"""Writes the errors that Envoy makes itself as JSON that the clients of OpenAI's and of Anthropic's API
parse.

Pure. Envoy tries the mappers in order, and the first whose filter matches decides. The picker's own answers
pass unchanged, because their response code details begin with `DETAILS`. `client_listener` calls this module.
"""

from __future__ import annotations

from typing import Final, Literal

from epp.base.errors import DETAILS, BlockedPathError, BodyTooLargeError, PickError, SaturatedError
from epp.serve.envoy import framing
from epp.serve.envoy.messages import Message, extension

_INVALID: Final = "invalid_request_error"
_AWAY: Final = "service_unavailable"

_ERRORS: Final = {
    400: (_INVALID, "malformed_request", "the request is not valid HTTP"),
    401: (_INVALID, "not_authenticated", "send valid credentials with the request"),
    403: (_INVALID, "not_allowed", "this gateway does not allow the request"),
    404: (BlockedPathError.error_type, BlockedPathError.reason, "not served by this gateway"),
    408: (_INVALID, "request_timeout", "the request was not complete in time; send it again"),
    413: (BodyTooLargeError.error_type, BodyTooLargeError.reason, "the request body is too large; send a shorter one"),
    429: (SaturatedError.error_type, "rate_limited", "too many requests; try again later"),
    431: (_INVALID, "headers_too_large", "the request has too many header fields, or too large ones; send fewer"),
    501: (_INVALID, "transfer_encoding", "the gateway accepts no transfer encoding except chunked"),
    503: (_AWAY, "unavailable", "no model server could take the request; try again later"),
    504: (_AWAY, "timeout", "the gateway had no answer in time; try again later"),
}  # fmt: skip
"""Status to `type`, `code` and `message`."""

_OVERFLOW: Final = "header_mutation_result_exceeds_limit"
"""Details of the 503 that a request gets if it has no room for the header fields that the gateway adds."""


def as_json() -> Message:
    """Return all error replies. A status that is not in the table gets a general text."""
    other = (PickError.error_type, PickError.reason, "the gateway could not answer")
    return {
        "mappers": [
            {"filter": _details(f"response.code_details.startsWith('{DETAILS}')")},
            {
                "filter": _details(f"response.code_details == '{_OVERFLOW}'"),
                "status_code": 431,
                "body_format_override": _body(*_ERRORS[431]),
            },
            *(
                {
                    "filter": _status(status, "EQ"),
                    "body_format_override": _body(*error),
                    **({"headers_to_add": [framing.MARK]} if status == 400 else {}),
                }
                for status, error in _ERRORS.items()
            ),
            {"filter": _status(400, "GE"), "body_format_override": _body(*other)},
        ]
    }


def _details(expression: str) -> Message:
    name = "access_loggers.extension_filters.cel"
    kind = "extensions.access_loggers.filters.cel.v3.ExpressionFilter"
    return {"extension_filter": extension(name, kind, expression=expression)}


def _status(status: int, comparison: Literal["EQ", "GE"]) -> Message:
    # Envoy requires the name of a runtime setting that could change the number. The setting stays unset.
    value = {"default_value": status, "runtime_key": f"gateway.error_{status}"}
    return {"status_code_filter": {"comparison": {"op": comparison, "value": value}}}


def _body(error_type: str, code: str, message: str) -> Message:
    error = {"message": message, "type": error_type, "param": None, "code": code}
    # The extra `type`, which OpenAI's clients ignore, lets Anthropic's clients read it too.
    return {"json_format": {"type": "error", "error": error}, "content_type": "application/json"}
