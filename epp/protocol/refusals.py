"""Makes the answers that the picker gives to clients itself, so that their requests go to no server: errors
in the format of the request's API, and the list of models. Pure. `asking` and `stream` call this module.
"""

from __future__ import annotations

from typing import Final

import msgspec

from epp.base.errors import FlowRefusedError, PickError, SaturatedError
from epp.picker.picker import Picker
from epp.protocol.header_names import read_addresses
from epp.protocol.http_events import Refuse, RequestHeaders

DROPPED: Final = "x-llm-d-request-dropped-reason"

_JSON: Final = ("content-type", "application/json")
_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def refused(error: PickError, *, path: str, request_id: str) -> Refuse:
    """Return the error in the format of the request's API: Anthropic's for /v1/messages and paths below it,
    such as `/v1/messages/count_tokens`, else OpenAI's.
    """
    body: dict[str, object]
    details: dict[str, object]
    if "/v1/messages/" in path.partition("?")[0] + "/":
        details = {"type": _ANTHROPIC_TYPES.get(error.status, "api_error"), "message": str(error)}
        body = {"type": "error", "error": details, "request_id": request_id}
    else:
        details = {"message": str(error), "type": error.error_type, "param": None, "code": error.reason}
        body = {"error": details}
    headers = [_JSON]
    if isinstance(error, SaturatedError):
        headers.append(("retry-after", str(error.retry_after_s)))
    if isinstance(error, FlowRefusedError):
        headers.append((DROPPED, error.reason))
    return Refuse(
        status=error.status, headers=tuple(headers), body=msgspec.json.encode(body), reason=error.reason
    )


def model_list(event: RequestHeaders, path: str, picker: Picker) -> Refuse | None:
    """Return the answer to `GET /v1/models`. None: this is another request, or no server has reported its
    models.
    """
    # Any prefix that a gateway put before the path is allowed.
    asked = path.partition("?")[0].rstrip("/").endswith("/v1/models")
    if not asked or (":method", "GET") not in event.headers:
        return None
    listed = picker.model_list(None if event.subset is None else read_addresses(event.subset))
    if listed is None:
        return None
    return Refuse(status=200, headers=(_JSON,), body=listed, reason="model_list")
