"""Makes the settings of Envoy's overload manager, which acts before Envoy's memory or its connections run
out.

Pure. Without the overload manager Envoy accepts connections and unfinished bodies until the kernel kills it,
together with every answer in flight. `bootstrap` calls this module.
"""

from __future__ import annotations

from typing import Any, Final

from epp.config.envoy import Envoy
from epp.serve.envoy.messages import Message, extension, typed

_HEAP: Final = "resource_monitors.fixed_heap"
_TRACKED_FROM: Final = 20
"""Streams that hold 2**20 bytes or more can be ended to free memory."""


def manager(envoy: Envoy) -> Message:
    """Return the actions by the share of `maxHeapBytes` in use: first free memory, then end the largest
    streams, then refuse requests.
    """
    connections = extension(
        "resource_monitors.global_downstream_max_connections",
        "extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        max_active_downstream_connections=envoy.max_connections,
    )
    if not envoy.max_heap_bytes:
        return {"resource_monitors": [connections]}
    heap = extension(
        _HEAP, f"extensions.{_HEAP}.v3.FixedHeapConfig", max_heap_size_bytes=envoy.max_heap_bytes
    )
    return {
        "refresh_interval": "0.1s",
        "buffer_factory_config": {"minimum_account_to_track_power_of_two": _TRACKED_FROM},
        "resource_monitors": [heap, connections],
        "actions": [
            _at("overload_actions.shrink_heap", 0.7),
            _between("overload_actions.reduce_timeouts", 0.7, 0.9) | {"typed_config": _shorter_idle_times()},
            # Nearer to the limit, Envoy ends smaller streams too. Many small requests survive.
            _between("overload_actions.reset_high_memory_stream", 0.8, 0.9),
            # New requests get 503. Answers that have begun continue.
            _at("overload_actions.stop_accepting_requests", 0.9),
        ],
        # Over HTTP/1.1 Envoy cannot end a stream for its memory.
        # So as the last step, clients that still send a request are cut off.
        "loadshed_points": [_at("load_shed_points.http1_server_abort_dispatch", 0.95)],
    }


def _at(name: str, share: float) -> Message:
    return _triggered(name, threshold={"value": share})


def _between(name: str, begins: float, full: float) -> Message:
    return _triggered(name, scaled={"scaling_threshold": begins, "saturation_threshold": full})


def _triggered(name: str, **trigger: Any) -> Message:
    return {"name": f"envoy.{name}", "triggers": [{"name": f"envoy.{_HEAP}", **trigger}]}


def _shorter_idle_times() -> Message:
    timer = {"timer": "HTTP_DOWNSTREAM_CONNECTION_IDLE", "min_timeout": "2s"}
    return typed("config.overload.v3.ScaleTimersOverloadActionConfig", timer_scale_factors=[timer])
