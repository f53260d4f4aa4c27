"""The parts that all streams of one server share: their settings, the picker, and the gate."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from epp.config.dialects import DIALECTS, Dialect
from epp.picker.gate import Gate
from epp.picker.picker import Picker
from epp.protocol.http_events import BodyRoom
from epp.request.blocked import BlockedPaths

_NOTHING_BLOCKED: Final = BlockedPaths(())


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The settings of all streams in this deployment."""

    max_body_bytes: int = 32 * 2**20
    room: BodyRoom = field(default_factory=BodyRoom)
    """The bound for the bodies of all streams together."""
    hold_streams: bool = True
    caller: Dialect = DIALECTS["envoy"]
    """The gateway. A stream gives one destination if its first message shows that the gateway reads only one.
    """
    conformance_headers: bool = False
    retries_once: bool = False
    """Whether our own Envoy retries once, so that the picker may allow a second retry."""
    mode_override: bool = True
    """Whether the data plane may be asked to stream a sampled answer."""
    longest_delay_s: float = 0.0
    """The longest time that the data plane can be asked to wait for the answer to a buffered body.

    0: it cannot be asked.
    """
    given_delay_s: float = 0.0
    """How long the data plane waits for the answer to a buffered body without being asked.

    0: unknown, so no request relies on it.
    """
    blocked: BlockedPaths = _NOTHING_BLOCKED
    answers_list: bool = True
    """Whether the picker answers `GET /v1/models` if any server has reported its models."""
    traced: bool = False
    """Whether trace contexts are read."""


@dataclass(frozen=True, slots=True)
class StreamContext:
    """The parts that all streams of a server use."""

    picker: Picker
    settings: StreamSettings
    new_request_id: Callable[[], str]
    timer: Callable[[], float]
    """Measures how long parsing and picking took."""
    gate: Gate | None = None
    """Where requests may wait."""
