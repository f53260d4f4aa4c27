"""Envoy's overload manager: what it does, and from which share of the memory on."""

from __future__ import annotations

from msgspec.structs import replace

from epp.config.envoy import Envoy
from epp.serve.envoy.overload_manager import manager


def test_memory_is_freed_before_streams_end_and_new_requests_are_refused_last() -> None:
    actions = manager(replace(Envoy(), max_heap_bytes=2**30))["actions"]
    begins = [
        (trigger.get("threshold", {}).get("value") or trigger["scaled"]["scaling_threshold"], action["name"])
        for action in actions
        for trigger in action["triggers"]
    ]
    assert [name.removeprefix("envoy.overload_actions.") for _, name in sorted(begins)] == [
        "reduce_timeouts",
        "shrink_heap",
        "reset_high_memory_stream",
        "stop_accepting_requests",
    ]
    assert max(share for share, _ in begins) < 1


def test_without_a_bound_of_memory_only_connections_are_bounded() -> None:
    made = manager(replace(Envoy(), max_heap_bytes=0, max_connections=7))
    (monitor,) = made["resource_monitors"]
    assert monitor["typed_config"]["max_active_downstream_connections"] == 7
    assert made.keys() == {"resource_monitors"}
