"""Makes the access log by which the picker learns of answers that a server cut midway.

Pure. `client_listener` calls this module. `epp.protocol.access_log` reads the entries.
"""

from __future__ import annotations

from epp.serve.envoy.messages import Message, extension, grpc_to
from epp.serve.envoy.names import PICKER


def access_log() -> Message:
    """Return an access log that sends the picker only the answers that began with 2xx and that their server
    cut.
    """
    # The flags mean: connection ended, stream reset, protocol error. A cut answer of HTTP/1.1 always has the
    # last flag. A client that leaves sets none of the flags.
    cut_by_the_server = {"response_flag_filter": {"flags": ["UC", "UR", "UPE"]}}
    most = {"default_value": 299, "runtime_key": "prefix_gateway.cut_answers.most_status"}
    began_well = {"status_code_filter": {"comparison": {"op": "LE", "value": most}}}
    log = extension(
        "access_loggers.http_grpc",
        "extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
        common_config={
            "log_name": "cut-answers",
            "grpc_service": grpc_to(PICKER),
            "transport_api_version": "V3",
            # The default is a second. With it, at 40 requests/s, ten more requests would go to a server that
            # cuts all answers.
            "buffer_flush_interval": "0.25s",
        },
    )
    return {**log, "filter": {"and_filter": {"filters": [cut_by_the_server, began_well]}}}
