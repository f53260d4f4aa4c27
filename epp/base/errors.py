"""Defines the errors that a client sees. Each has an HTTP status and a short label for metrics.

A module raises the error where it finds the fault. Only `protocol` turns errors into answers.
"""

import contextlib
from collections.abc import Iterator
from typing import Final

DETAILS_PREFIX: Final = "picker_"
"""Prefix of the response details that the data plane writes into its access log when the picker answered with
an error. `PickError.reason` follows the prefix.
"""
_MOST_NAME_CHARS: Final = 200
"""The answer repeats at most this many characters of a name that a client sent."""


class PickError(Exception):
    """The request gets no endpoint. The client sees the message, so the message says what to do next."""

    status = 500
    reason = "internal"
    """Label of the metric. It is short and comes from a fixed set."""
    error_type = "internal_server_error"
    """`error.type` in the OpenAI-shaped body."""

    def __init__(self, message: str, *, reason: str = "") -> None:
        """reason: in place of the reason of the class."""
        super().__init__(message)
        self.reason = reason or self.reason


class BadRequestError(PickError):
    """The body does not fit its API."""

    status = 400
    error_type = "invalid_request_error"


class BlockedPathError(PickError):
    """The path is one that the model servers have for their operators only."""

    status = 404
    reason = "path_not_served"
    error_type = "not_found_error"


class BodyTooLargeError(PickError):
    status = 413
    reason = "body_too_large"
    error_type = "invalid_request_error"

    def __init__(self, *, limit_bytes: int) -> None:
        super().__init__(f"The request body is over the limit of {limit_bytes} bytes; send a shorter one.")


class NoEndpointError(PickError):
    """No endpoint is ready, or none in the subset that the data plane allows."""

    status = 503
    error_type = "service_unavailable"


class NotReadyError(NoEndpointError):
    """There may be servers of the model, but none of them is ready."""

    def __init__(self) -> None:
        super().__init__(
            "no model server is ready for this model; check the endpoints file or the InferencePool's pods, and "
            "whether the servers sleep",
            reason="no_ready_endpoint",
        )


class UnknownModelError(PickError):
    """No server has the model. The list of models of every server is known."""

    status = 404
    reason = "model_not_found"
    error_type = "invalid_request_error"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model {model[:_MOST_NAME_CHARS]!r} does not exist; GET /v1/models lists the models that exist."
        )


class SaturatedError(PickError):
    """Every endpoint is over its limit, and the policy says to refuse."""

    status = 429
    reason = "saturated"
    error_type = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: int, reason: str = "") -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class FlowRefusedError(SaturatedError):
    """Flow control refuses the request: because of its deadline, a long wait, or too many waiting
    requests.
    """


class FatalRequestError(SaturatedError):
    """The same request has just ended the servers that took it."""

    status = 503
    reason = "fatal_request"
    error_type = "service_unavailable"

    def __init__(self, *, retry_after_s: int) -> None:
        message = (
            "model servers ended while they read this same request, so it is not sent to another one; "
            f"change it, or try again in {retry_after_s} s"
        )
        super().__init__(message, retry_after_s=retry_after_s)


class ConfigError(Exception):
    """A configuration, policy or endpoints file cannot be used. The message names the file and the field."""


_TO_DO: Final[dict[type[OSError], str]] = {
    FileNotFoundError: "create it, or correct the path",
    PermissionError: "give this user access, or name another path",
    NotADirectoryError: "one part of this path is a file and not a folder: correct the path",
}


def to_do(error: OSError) -> str:
    """Return what a person does about a path that cannot be used."""
    return _TO_DO.get(type(error), "name another path")


@contextlib.contextmanager
def usable(what: str = "", *, advice: str = "") -> Iterator[None]:
    """Raise ConfigError for an OSError of the block. It names `what` or else the file, the reason, and the
    advice or what else a person does about it.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what or error.filename}: {error.strerror}; {advice or to_do(error)}") from error
