"""The gRPC health service of the picker, under the names that data planes and kubelets ask for.

`liveness` is serving as long as the process answers; the others follow readiness, which a drain takes away first so that data
planes go elsewhere while streams in flight finish. An unknown service is SERVICE_UNKNOWN in Watch and in Check alike: the endpoint
picker protocol asks for that status, where gRPC's own convention for Check would be an error.
"""

from __future__ import annotations

from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from epp.extproc.codec import SERVICE

LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
_FOLLOW_READINESS: Final = ("", READINESS, SERVICE)


class _Servicer(HealthServicer):  # type: ignore[misc]  # grpcio-health-checking ships no types
    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002 - gRPC's name and signature
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        return health_pb2.HealthCheckResponse(status=self._server_status.get(request.service, unknown))


class Health:
    def __init__(self) -> None:
        self._servicer = _Servicer()

    def register(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_live(self) -> None:
        await self._servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)

    async def set_ready(self, *, ready: bool) -> None:
        serving, not_serving = (
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        )
        for service in _FOLLOW_READINESS:
            await self._servicer.set(service, serving if ready else not_serving)
