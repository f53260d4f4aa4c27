"""All ways in which a data plane may send bodies. The gateways of the conformance tool use some of them."""

from __future__ import annotations

from typing import Final

from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2

from epp.tools.conformance.dataplane import BUFFERED, DUPLEX, Mode

_BODY: Final = processing_mode_pb2.ProcessingMode.BodySendMode

NONE: Final = Mode(_BODY.NONE)
PARTIAL: Final = Mode(_BODY.BUFFERED_PARTIAL)
STREAMED: Final = Mode(_BODY.STREAMED, _BODY.STREAMED)
DUPLEX_REQUEST: Final = Mode(_BODY.FULL_DUPLEX_STREAMED)
SILENT_DUPLEX: Final = Mode(_BODY.FULL_DUPLEX_STREAMED, _BODY.FULL_DUPLEX_STREAMED, silent=True)

MODES: Final = {
    "none": NONE,
    "buffered": BUFFERED,
    "buffered_partial": PARTIAL,
    "streamed": STREAMED,
    "full_duplex": DUPLEX,
    "full_duplex_request": DUPLEX_REQUEST,
    "full_duplex_silent": SILENT_DUPLEX,
}
