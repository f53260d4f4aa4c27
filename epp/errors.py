"""Errors that reach a client: one type, each carrying its HTTP status and a short label for metrics.

Raised wherever the fault is found, mapped to an answer once, in `extproc`.
"""

from __future__ import annotations

from typing import Final

DETAILS: Final = "picker_"
"""What the data plane writes into its access log of an error that the picker answered:
this, and `PickError.reason`."""
_MOST_NAME_CHARS: Final = 200
"""Of a name that a client sent, in the answer to it."""


class PickError(Exception):
    """A request that gets no endpoint. The message is shown to the client, so it says what to do next."""

    status = 500
    reason = "internal"
    """Label of the metric; short, from a fixed set."""
    error_type = "internal_server_error"
    """`error.type` in the OpenAI-shaped body."""


class BadRequestError(PickError):
    """The body is not what its API asks for."""

    status = 400
    error_type = "invalid_request_error"

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class BlockedPathError(PickError):
    """A page of the model servers for their operators."""

    status = 404
    reason = "path_not_served"
    error_type = "not_found_error"


class BodyTooLargeError(PickError):
    status = 413
    reason = "body_too_large"
    error_type = "invalid_request_error"


class NoEndpointError(PickError):
    """No ready endpoint, or none in the subset that the data plane allows."""

    status = 503
    error_type = "service_unavailable"

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class UnknownModelError(PickError):
    """No server has the model, and every server has said what it has."""

    status = 404
    reason = "model_not_found"
    error_type = "invalid_request_error"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model {model[:_MOST_NAME_CHARS]!r} does not exist; GET /v1/models lists those that do."
        )


class SaturatedError(PickError):
    """Every endpoint is over its limit and the policy says to refuse."""

    status = 429
    reason = "saturated"
    error_type = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoRoomError(SaturatedError):
    """The bodies that wait for the rest of them are over their bound,
    and the policy says to refuse at overload.
    """

    reason = "no_room"

    def __init__(self, *, retry_after_s: int) -> None:
        message = f"the gateway holds too many unfinished bodies; try again in {retry_after_s} s"
        super().__init__(message, retry_after_s=retry_after_s)


class FlowRefusedError(SaturatedError):
    """Flow control will not let it go: its deadline cannot be met, it has waited too long,
    or too many wait.
    """

    def __init__(self, message: str, *, reason: str, retry_after_s: int, waited_s: float = 0.0) -> None:
        """waited_s: how long it was held before."""
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason
        self.waited_s = waited_s


class ConfigError(Exception):
    """A configuration, policy or endpoints file that cannot be used;
    the message names the file and the field.
    """


class RecordingTakenError(Exception):
    """Somebody else reads the picker's requests for a recording; they are handed out once."""
