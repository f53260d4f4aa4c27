"""The health of the picker, under the names that data planes and kubelets ask for.

`liveness` is SERVING as long as the process answers. The other names follow readiness. A drain ends readiness
first, so that data planes use other pickers while streams in flight finish. An unknown service is
SERVICE_UNKNOWN in both Watch and Check: the endpoint picker protocol requires this status, although gRPC's
own convention for Check would be an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from epp.protocol.conversation import SERVICE

NAME: Final = "grpc.health.v1.Health"
"""The gRPC service that answers."""
LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
INFERENCE_EXTENSION: Final = "inference-extension"
"""The name in the probes of gateway-api-inference-extension's own manifests."""
_FOLLOW_READINESS: Final = ("", READINESS, INFERENCE_EXTENSION, SERVICE)

# HealthCheckResponse.ServingStatus of grpc.health.v1.
SERVING: Final = 1
NOT_SERVING: Final = 2
SERVICE_UNKNOWN: Final = 3


class Health:
    """The statuses, and the callbacks to run when they change."""

    def __init__(self) -> None:
        self.ready = False
        self._listeners: set[Callable[[], None]] = set()

    def status(self, service: str) -> int:
        if service == LIVENESS:
            return SERVING
        if service in _FOLLOW_READINESS:
            return SERVING if self.ready else NOT_SERVING
        return SERVICE_UNKNOWN

    def set_ready(self, *, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            for on_change in list(self._listeners):
                on_change()

    def follow(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call `on_change` after each change, until the returned function is called."""
        self._listeners.add(on_change)
        return lambda: self._listeners.discard(on_change)
