"""The access log by which the picker learns of answers that a server cut midway.

Pure: makes typed Envoy messages. Called by `listener`. The picker's end is `epp.extproc.access_log`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from envoy_data_plane.envoy.config.accesslog.v3 import (
    AccessLog,
    AccessLogFilter,
    AndFilter,
    ComparisonFilter,
    ComparisonFilterOp,
    ResponseFlagFilter,
    StatusCodeFilter,
)
from envoy_data_plane.envoy.config.core.v3 import (
    ApiVersion,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    RuntimeUInt32,
)
from envoy_data_plane.envoy.extensions.access_loggers.grpc.v3 import (
    CommonGrpcAccessLogConfig,
    HttpGrpcAccessLogConfig,
)
from envoy_data_plane.google.protobuf import Any as AnyMessage

from epp.envoy.names import PICKER

_CUT_BY_THE_SERVER: Final = ["UC", "UR", "UPE"]
"""Connection ended, stream reset, protocol error. A cut answer of HTTP/1.1 always has the last of these. A
client that leaves sets none of them.
"""


def access_log() -> AccessLog:
    """Sends the picker the answers that began with 2xx and that their server cut, and no others."""
    picker = GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=PICKER))
    config = HttpGrpcAccessLogConfig(
        common_config=CommonGrpcAccessLogConfig(
            log_name="cut-answers",
            grpc_service=picker,
            transport_api_version=ApiVersion.V3,
            # The default is a second. With it, at 40 requests/s, ten more requests would go to a server that
            # cuts all answers.
            buffer_flush_interval=timedelta(seconds=0.25),
        )
    )
    began_well = ComparisonFilter(
        op=ComparisonFilterOp.LE,
        value=RuntimeUInt32(default_value=299, runtime_key="prefix_gateway.cut_answers.most_status"),
    )
    return AccessLog(
        name="envoy.access_loggers.http_grpc",
        filter=AccessLogFilter(
            and_filter=AndFilter(
                filters=[
                    AccessLogFilter(response_flag_filter=ResponseFlagFilter(flags=_CUT_BY_THE_SERVER)),
                    AccessLogFilter(status_code_filter=StatusCodeFilter(comparison=began_well)),
                ]
            )
        ),
        typed_config=AnyMessage.pack(config),
    )
