"""Envoy's gRPC access log service, from which the picker learns that a server cut an answer midway.

ext_proc shows a cut answer and a complete one alike. So our Envoy sends a log entry for each answer that
began with 2xx and that its server broke off (`serve/envoy/bootstrap.yaml` has the filter). Our Envoy
sends no entry for any other request. Other gateways may send all their entries, so entries that show no cut
are skipped.

The size of a message and the number of its entries are bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from envoy.data.accesslog.v3.accesslog_pb2 import HTTPAccessLogEntry
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from google.protobuf.message import DecodeError

from epp.base.types import Address
from epp.picker.picker import Picker
from epp.protocol.calls import Caller, Handler

METHOD: Final = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
MOST_MESSAGE_BYTES: Final = 128 * 1024
"""The most bytes of one message. The first message of a call names all of Envoy's extensions, in some 61 KB.
Later messages hold 16 KiB and one entry, which may have 60 KiB of header fields. The worst message of this
length takes 8 ms to decode."""
MOST_ENTRIES: Final = 256
"""The most entries that are read from one message. An entry has some 350 bytes, so Envoy sends 50
at a time."""


class AccessLog(Handler):
    """One call, which takes in messages. The only answer follows the caller's last message."""

    def __init__(self, picker: Picker, on_fault: Callable[[str], None], call: Caller) -> None:
        self._picker = picker
        self._on_fault = on_fault
        self._call = call

    def message(self, data: bytes, *, now: float) -> None:
        """Read one message. This never fails: entries that cannot be used are counted."""
        if len(data) > MOST_MESSAGE_BYTES:
            self._on_fault("access_log_too_large")
            return
        try:
            entries = StreamAccessLogsMessage.FromString(data).http_logs.log_entry
        except DecodeError:
            self._on_fault("access_log_unreadable")
            return
        if len(entries) > MOST_ENTRIES:
            self._on_fault("access_log_too_large")
        for entry in entries[:MOST_ENTRIES]:
            if _is_cut(entry):
                socket = entry.common_properties.upstream_remote_address.socket_address
                server = Address(socket.address, socket.port_value)
                if not self._picker.news.answer_cut(server, now=now):
                    self._on_fault("cut_by_unknown_server")

    def half_closed(self, *, now: float) -> None:
        self._call.send(b"")
        self._call.end()


def _is_cut(entry: HTTPAccessLogEntry) -> bool:
    """Return whether the answer began well and was then broken off by the server."""
    flags = entry.common_properties.response_flags
    cut = (
        flags.upstream_connection_termination or flags.upstream_remote_reset or flags.upstream_protocol_error
    )
    return bool(cut) and 200 <= entry.response.response_code.value < 300
