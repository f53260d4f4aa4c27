"""Answers of the picker itself, whose requests go to no server: errors in the format of the request's API,
and the list of models. Decides whether the picker reads the body of a server's answer, because its pick is
sampled, and answers the headers of such answers. Pure; called by `stream`.
"""

from typing import Final

import msgspec

from epp.base.errors import FlowRefusedError, PickError, SaturatedError
from epp.base.types import ApiKind
from epp.picker.events import Pick
from epp.picker.picker import Picker
from epp.protocol.asking import collect
from epp.protocol.header_names import DECISION, TEST_SERVED, read_addresses
from epp.protocol.http_events import Answer, BodyMode, Headers, Modes, Refuse, Slot
from epp.protocol.settings import StreamSettings
from epp.request.response import ResponseReader

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
    details = {"message": str(error), "type": error.error_type, "param": None, "code": error.reason}
    body: dict[str, object] = {"error": details}
    if "/v1/messages/" in path.partition("?")[0] + "/":
        details = {"type": _ANTHROPIC_TYPES.get(error.status, "api_error"), "message": str(error)}
        body = {"type": "error", "error": details, "request_id": request_id}
    headers = [_JSON]
    if isinstance(error, SaturatedError):
        headers.append(("retry-after", str(error.retry_after_s)))
    if isinstance(error, FlowRefusedError):
        headers.append((DROPPED, error.reason))
    return Refuse(
        status=error.status, headers=tuple(headers), body=msgspec.json.encode(body), reason=error.reason
    )


def model_list(event: Headers, path: str, picker: Picker) -> Refuse | None:
    """Return the answer to `GET /v1/models`. None: this is another request, or no server has reported its
    models.
    """
    # Any prefix that a gateway put before the path is allowed.
    asked = path.partition("?")[0].rstrip("/").endswith("/v1/models")
    if not asked or (":method", "GET") not in event.headers:
        return None
    listed = picker.fleet.served.model_list(None if event.subset is None else read_addresses(event.subset))
    if listed is None:
        return None
    return Refuse(status=200, headers=(_JSON,), body=listed, reason="model_list")


def sampled_answer(
    event: Headers, pick: Pick, settings: StreamSettings, *, modes: Modes, hold: bool
) -> ResponseReader | None:
    """Return the reader for the body of the answer to a sampled pick. None: it cannot be read. hold: the
    stream stays to the end. A data plane that wants the request's body back cannot be asked for that of the
    answer.
    """
    comes = (
        event.end_of_stream
        or modes.response_body is not BodyMode.NONE
        or (hold and settings.mode_override and not modes.request_body.echoed)
    )
    if pick.decision.status != 200 or not comes:
        return None
    found = collect(event.headers)
    return ResponseReader(
        kind=ApiKind(pick.decision.kind),
        content_type=found.get("content-type", ""),
        content_encoding=found.get("content-encoding", ""),
    )


def answer_to_headers(
    event: Headers, explained: Pick | None, settings: StreamSettings, *, asks_for_body: bool
) -> Answer:
    """Return the picker's message about the headers of an answer that is not only passed on. explained: the
    pick whose reasons the client asked for.
    """
    headers: list[tuple[str, str]] = []
    if explained is not None:
        headers.append((DECISION, explained.explanation))
    if settings.conformance_headers and event.served:
        headers.append((TEST_SERVED, event.served))
    return Answer(Slot.RESPONSE_HEADERS, set_headers=tuple(headers), stream_response=asks_for_body)
