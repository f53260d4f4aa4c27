"""The parts that follow from the configuration alone."""

from __future__ import annotations

from typing import Any

import pytest

from epp.config.envoy import Envoy
from epp.config.listening import Listen
from epp.config.settings import Config, StreamLimits
from epp.protocol.bodies import BodyRoom
from epp.request.parse import API_PATHS
from epp.serve.parts import exact_mode, listen, stream_settings
from tests.unit.picker.picker_questions import a_picker


def config(**fields: Any) -> Config:
    return Config(endpoints_file="e.yaml", **fields)


def test_each_worker_listens_at_its_own_address_with_the_common_settings() -> None:
    shared = Listen(address="unix:/run/p.sock", socket_mode="0600")
    made = [listen(config(workers=2, listen=shared), worker=n) for n in range(2)]
    assert [each.address for each in made] == ["unix:/run/p.sock.0", "unix:/run/p.sock.1"]
    assert {each.socket_mode for each in made} == {"0600"}


def test_parts_that_are_not_configured_are_not_made() -> None:
    assert exact_mode(config(), a_picker()) is None


@pytest.mark.parametrize(
    ("fields", "held", "destinations", "asks_s", "given_s"),
    [
        ({}, True, 1, 0.0, 0.0),
        ({"envoy": Envoy(eds_file="/e")}, True, 8, 60.0, 0.0),
        ({"dialect": "ai-gateway"}, False, 1, 0.0, 0.0),
        ({"dialect": "envoy-gateway", "envoy": Envoy(message_timeout_seconds=7)}, True, 8, 0.0, 7.0),
        ({"hold_streams": False}, False, 1, 0.0, 0.0),
    ],
    ids=["unknown", "own-envoy", "fails-closed", "fixed-time", "not-held"],
)
def test_the_settings_of_streams_follow_the_gateway(
    fields: dict[str, Any], *, held: bool, destinations: int, asks_s: float, given_s: float
) -> None:
    made = stream_settings(config(**fields), BodyRoom(), traced=False)
    assert (made.hold_streams, made.max_destinations) == (held, destinations)
    assert (made.longest_delay_s, made.given_delay_s) == (asks_s, given_s)


def test_paths_that_are_allowed_are_not_blocked() -> None:
    made = stream_settings(
        config(blocked_paths=("/metrics", "/version"), allowed_paths=("/version",)), BodyRoom(), traced=False
    )
    assert made.blocked.refuse("/metrics")
    assert not made.blocked.refuse("/version")
    assert made.blocked.open_apis == API_PATHS


def test_the_room_of_bodies_and_the_switches_are_passed_on() -> None:
    room = BodyRoom()
    made = stream_settings(config(streams=StreamLimits(mode_override=False)), room, traced=True)
    assert made.room is room
    assert (made.traced, made.mode_override) == (True, False)
