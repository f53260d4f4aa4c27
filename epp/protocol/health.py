"""The health of the picker, under the names that data planes and kubelets ask for.

`liveness` is SERVING as long as the process answers. The other names follow readiness. A drain ends readiness
first, so that data planes use other pickers while streams in flight finish. An unknown service is
SERVICE_UNKNOWN in both Watch and Check: the endpoint picker protocol requires this status, although gRPC's
own convention for Check would be an error.
"""

from collections.abc import Mapping
from functools import partial
from typing import Final

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from epp.protocol.calls import Caller, Handler, Service
from epp.protocol.conversation import SERVICE
from epp.transport.http2.messages import INTERNAL

NAME: Final = "grpc.health.v1.Health"
"""The gRPC service that answers."""
MOST_QUESTION_BYTES: Final = 1024
"""The most bytes of a question. It names a service."""
_FOLLOW_READINESS: Final = ("", "readiness", "inference-extension", SERVICE)
"""`inference-extension` is the name in the probes of gateway-api-inference-extension's own manifests."""


class Health:
    """The statuses, and the calls that follow them."""

    def __init__(self) -> None:
        self.ready = False
        self.watching: set[_HealthCall] = set()
        """The calls to which each change is told."""

    def status(self, service: str) -> str:
        """Return the name of a `HealthCheckResponse.ServingStatus`."""
        if service == "liveness":
            return "SERVING"
        if service in _FOLLOW_READINESS:
            return "SERVING" if self.ready else "NOT_SERVING"
        return "SERVICE_UNKNOWN"

    def set_ready(self, *, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            for call in list(self.watching):
                call.send_status()

    def services(self) -> Mapping[str, Service]:
        return {
            f"/{NAME}/{method}": partial(_HealthCall, self, watch=method == "Watch")
            for method in ("Check", "Watch")
        }


class _HealthCall(Handler):
    """Answers one question. With `watch` it answers again after each change, until the caller leaves."""

    def __init__(self, health: Health, call: Caller, *, watch: bool) -> None:
        self._call = call
        self._health = health
        self._watch = watch
        self._service: str | None = None
        self._status = ""

    def message(self, data: bytes, *, now: float) -> None:
        service = _asked(data)
        if service is None or self._service is not None:
            self._health.watching.discard(self)
            self._call.end(INTERNAL, "one message that can be read must come")
            return
        self._service = service
        if self._watch:
            self._health.watching.add(self)
        self.send_status()
        if not self._watch:
            self._call.end()

    def half_closed(self, *, now: float) -> None:
        if self._service is None:
            self._call.end(INTERNAL, "no message came")

    def gone(self, *, now: float, broken: bool) -> None:
        self._health.watching.discard(self)

    def send_status(self) -> None:
        assert self._service is not None
        status = self._health.status(self._service)
        if status != self._status:
            self._status = status
            self._call.send(health_pb2.HealthCheckResponse(status=status).SerializeToString())


def _asked(data: bytes) -> str | None:
    if len(data) > MOST_QUESTION_BYTES:
        return None
    try:
        return str(health_pb2.HealthCheckRequest.FromString(data).service)
    except DecodeError:
        return None
