"""Settings of Envoy's overload manager: what Envoy does before its memory or its connections run out.

Pure. Without the overload manager Envoy accepts connections and unfinished bodies until the kernel kills it,
together with every answer in flight. Called by `bootstrap`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from envoy_data_plane.envoy.config.overload.v3 import (
    BufferFactoryConfig,
    LoadShedPoint,
    OverloadAction,
    OverloadManager,
    ResourceMonitor,
    ScaledTrigger,
    ScaleTimersOverloadActionConfig,
    ScaleTimersOverloadActionConfigScaleTimer,
    ScaleTimersOverloadActionConfigTimerType,
    ThresholdTrigger,
    Trigger,
)
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections.v3 import (
    DownstreamConnectionsConfig,
)
from envoy_data_plane.envoy.extensions.resource_monitors.fixed_heap.v3 import FixedHeapConfig
from envoy_data_plane.google.protobuf import Any as AnyMessage

if TYPE_CHECKING:
    from epp.config.envoy import Envoy

_HEAP: Final = "envoy.resource_monitors.fixed_heap"
_CONNECTIONS: Final = "envoy.resource_monitors.global_downstream_max_connections"

_TRACKED_FROM: Final = 20
"""Streams that hold 2**20 bytes or more can be ended to free memory."""


def manager(envoy: Envoy) -> OverloadManager:
    """Actions by the share of `maxHeapBytes` in use: first free memory, then end the largest streams, then
    refuse requests.
    """
    connections = DownstreamConnectionsConfig(max_active_downstream_connections=envoy.max_connections)
    monitors = [ResourceMonitor(name=_CONNECTIONS, typed_config=AnyMessage.pack(connections))]
    if not envoy.max_heap_bytes:
        return OverloadManager(resource_monitors=monitors)
    heap = FixedHeapConfig(max_heap_size_bytes=envoy.max_heap_bytes)
    return OverloadManager(
        refresh_interval=timedelta(milliseconds=100),
        buffer_factory_config=BufferFactoryConfig(minimum_account_to_track_power_of_two=_TRACKED_FROM),
        resource_monitors=[ResourceMonitor(name=_HEAP, typed_config=AnyMessage.pack(heap)), *monitors],
        actions=[
            _action("shrink_heap", ThresholdTrigger(value=0.7)),
            _shorter_idle_times(),
            # The nearer the limit, the smaller the streams that are ended. Many small requests survive.
            _action("reset_high_memory_stream", ScaledTrigger(scaling_threshold=0.8, saturation_threshold=0.9)),
            # New requests get 503. Answers that have begun continue.
            _action("stop_accepting_requests", ThresholdTrigger(value=0.9)),
        ],
        # Over HTTP/1.1 Envoy cannot end a stream for its memory.
        # So as the last step, clients that still send a request are cut off.
        loadshed_points=[
            LoadShedPoint(
                name="envoy.load_shed_points.http1_server_abort_dispatch",
                triggers=[_trigger(ThresholdTrigger(value=0.95))],
            )
        ],
    )  # fmt: skip


def _action(
    name: str, trigger: ThresholdTrigger | ScaledTrigger, config: AnyMessage | None = None
) -> OverloadAction:
    return OverloadAction(
        name=f"envoy.overload_actions.{name}", triggers=[_trigger(trigger)], typed_config=config
    )


def _trigger(trigger: ThresholdTrigger | ScaledTrigger) -> Trigger:
    if isinstance(trigger, ThresholdTrigger):
        return Trigger(name=_HEAP, threshold=trigger)
    return Trigger(name=_HEAP, scaled=trigger)


def _shorter_idle_times() -> OverloadAction:
    timer = ScaleTimersOverloadActionConfigScaleTimer(
        timer=ScaleTimersOverloadActionConfigTimerType.HTTP_DOWNSTREAM_CONNECTION_IDLE,
        min_timeout=timedelta(seconds=2),
    )
    config = AnyMessage.pack(ScaleTimersOverloadActionConfig(timer_scale_factors=[timer]))
    return _action("reduce_timeouts", ScaledTrigger(scaling_threshold=0.7, saturation_threshold=0.9), config)
