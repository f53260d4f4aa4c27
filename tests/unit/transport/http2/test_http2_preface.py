"""The first bytes of either side of a connection."""

from __future__ import annotations

from epp.transport.http2.frames import Kind, Setting
from tests.harness.http2_frames import CallerSide


def test_the_server_sends_its_settings_and_window_first() -> None:
    first, second = CallerSide().greeting
    assert (first.kind, second.kind) == (Kind.SETTINGS, Kind.WINDOW_UPDATE)
    said = {
        int.from_bytes(first.payload[n : n + 2]): int.from_bytes(first.payload[n + 2 : n + 6])
        for n in range(0, 30, 6)
    }
    assert said[Setting.HEADER_TABLE_SIZE] == 0
    assert said[Setting.INITIAL_WINDOW_SIZE] == 2**20
