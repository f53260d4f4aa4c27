"""Envoy's access log entries: which entries report that a server cut an answer, and how much of an entry
is read.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from envoy.data.accesslog.v3.accesslog_pb2 import HTTPAccessLogEntry
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage

from epp.base.types import Address, Endpoint, EndpointName
from epp.config.policy import DEFAULT_POLICY
from epp.picker.events import Cut, PickerEvent
from epp.picker.picker import Picker
from epp.protocol.access_log import MOST_ENTRIES, MOST_MESSAGE_BYTES, AccessLog


class CutRig:
    def __init__(self) -> None:
        self.picker = Picker(DEFAULT_POLICY, rng=random.Random(0))
        endpoints = [Endpoint(EndpointName("a"), Address("10.0.0.1", 8000))]
        endpoints += [
            Endpoint(EndpointName(f"r{n}"), Address("10.0.0.2", 8000), rank=n, incarnation=str(n))
            for n in range(2)
        ]
        self.picker.news.set_endpoints(endpoints, now=0.0)
        self.cut: list[str] = []
        self.faults: list[str] = []
        self.picker.subscribe(self._hear)
        self.log = AccessLog(self.picker, self.faults.append)

    def _hear(self, event: PickerEvent) -> None:
        if isinstance(event, Cut):
            self.cut.append(event.server.endpoint.name)


def entry(
    flag: str = "upstream_protocol_error", *, status: int = 200, host: str = "10.0.0.1", port: int = 8000
) -> HTTPAccessLogEntry:
    made = HTTPAccessLogEntry()
    made.common_properties.upstream_remote_address.socket_address.address = host
    made.common_properties.upstream_remote_address.socket_address.port_value = port
    if flag:
        setattr(made.common_properties.response_flags, flag, True)
    made.response.response_code.value = status
    return made


def log_message(*entries: Any) -> bytes:
    made = StreamAccessLogsMessage()
    made.http_logs.log_entry.extend(entries)
    return bytes(made.SerializeToString())


@pytest.mark.parametrize(
    "flag", ["upstream_connection_termination", "upstream_remote_reset", "upstream_protocol_error"]
)
def test_an_answer_that_its_server_ended_midway_is_reported_as_cut(flag: str) -> None:
    rig = CutRig()
    rig.log.receive(log_message(entry(flag)), now=1.0)
    assert (rig.cut, rig.faults) == (["a"], [])


@pytest.mark.parametrize(
    "other",
    [
        entry(""),
        entry("downstream_connection_termination"),
        entry("stream_idle_timeout"),
        entry(status=503),
        entry(status=404),
        entry(status=101),
        entry(status=0),
    ],
)
def test_other_entries_change_nothing(other: HTTPAccessLogEntry) -> None:
    rig = CutRig()
    rig.log.receive(log_message(other), now=1.0)
    assert (rig.cut, rig.faults) == ([], [])
    assert not rig.picker.fleet.failures.marks


@pytest.mark.parametrize(
    "stranger",
    [entry(host="10.9.9.9"), entry(port=1), entry(host=""), entry(host="x" * 5000), entry(port=10**9),
     entry(host="10.0.0.2")],
    ids=["host", "port", "no host", "a long host", "no port", "two ranks"],
)  # fmt: skip
def test_a_cut_at_an_unknown_address_is_only_counted(
    stranger: HTTPAccessLogEntry,
) -> None:
    rig = CutRig()
    rig.log.receive(log_message(stranger), now=1.0)
    assert (rig.cut, rig.faults) == ([], ["cut_by_unknown_server"])


def test_the_number_of_entries_and_bytes_read_from_a_message_is_bounded() -> None:
    rig = CutRig()
    rig.log.receive(log_message(*[entry() for _ in range(MOST_ENTRIES + 5)]), now=1.0)
    assert len(rig.cut) == MOST_ENTRIES
    rig.log.receive(b"\x12" * (MOST_MESSAGE_BYTES + 1), now=1.0)
    assert rig.faults == ["access_log_too_large"] * 2
    rig.log.receive(b"\xff\xff", now=1.0)
    assert rig.faults[2:] == ["access_log_unreadable"]
