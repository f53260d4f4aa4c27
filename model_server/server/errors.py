"""The errors that a client can cause. Each is an ApiError with an HTTP status, and `app` turns it into an
answer of OpenAI's shape.
"""

_SHOWN_CHARACTERS = 200
"""The most characters of a client's own text in a message to the client."""


ANTHROPIC_TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors, by status. Others are `api_error` from 500 on, and `invalid_request_error`."""


class ApiError(Exception):
    """The message is shown to the client."""

    status = 400
    error_type = "invalid_request_error"
    code: str | None = None
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def body(self) -> dict[str, dict[str, str | None]]:
        shown = {"message": str(self), "type": self.error_type, "param": self.param, "code": self.code}
        return {"error": shown}


class TooLongError(ApiError):
    code = "context_length_exceeded"


class ModelNotFoundError(ApiError):
    status = 404
    code = "model_not_found"

    def __init__(self, name: str) -> None:
        shown = name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}..."
        super().__init__(f"The model {shown!r} does not exist here.", param="model")


class QueueFullError(ApiError):
    status = 429
    error_type = "rate_limit_exceeded"
    code = "queue_full"
    retry_after_s = 1


class DrainingError(ApiError):
    status = 503
    error_type = "service_unavailable"
    code = "draining"


class EngineStoppedError(ApiError):
    """The engine's loop has ended, by a fault of its own or at the end of a drain."""

    status = 500
    error_type = "internal_server_error"
    code = "engine_stopped"

    def __init__(self) -> None:
        super().__init__("The engine has stopped; the request was not finished.")


class UnexpectedError(ApiError):
    status = 500
    error_type = "internal_server_error"
    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("The server failed; its log says why.")
