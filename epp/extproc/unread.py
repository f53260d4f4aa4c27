"""Answers requests that the picker has no time to read. It routes them by load, from their headers only, and
forgets them.

Such a request gets no state machine: its stream ends with the first answer, and the data plane handles the
rest alone. Only usual requests are answered here. For all others `answer` returns None, and a normal stream
is opened. This module refuses everything that a normal stream refuses. Pure. `live_streams.LiveStreams` owns
an `Unread`.
"""

from __future__ import annotations

from collections.abc import Callable

from epp.decision import PickRequest
from epp.errors import PickError
from epp.extproc.asking import OVERLOADED, not_set, read_head
from epp.extproc.header_names import DESTINATION
from epp.extproc.http_events import Answer, BodyMode, Event, RequestHeaders, Slot
from epp.extproc.stream_settings import StreamSettings
from epp.picker.events import Pick
from epp.picker.picker import Picker

_SIMPLE = frozenset((BodyMode.STREAMED, BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL))
"""The data plane itself sends the body on."""


class Unread:
    def __init__(self, picker: Picker, *, timer: Callable[[], float]) -> None:
        self._picker = picker
        self._timer = timer

    def answers(self, settings: StreamSettings) -> bool:
        """Return whether usual requests are answered here at all."""
        unusual = settings.traced or settings.scores_metadata or settings.conformance_headers
        return not unusual and self._picker.one_model

    def answer(self, event: Event, *, settings: StreamSettings, now: float) -> Answer | None:
        """Return the answer to the first message of a stream. The stream ends with this answer. None: the
        stream must be opened.
        """
        picker, started = self._picker, self._timer()
        if not isinstance(event, RequestHeaders) or event.end_of_stream or event.subset is not None:
            return None
        if event.modes is None or event.modes.request_body not in _SIMPLE:
            return None
        head = read_head(event.headers, picker.policy.spec)
        if not head.request_id or not head.path or settings.blocked.refuse(head.path):
            return None
        if head.declared_bytes > settings.max_body_bytes:
            return None
        request = PickRequest(
            request_id=head.request_id,
            inference=OVERLOADED,
            body_bytes=head.declared_bytes,
            max_destinations=settings.max_destinations,
            hurried=True,
            began_s=started,
        )
        try:
            pick = picker.pick(request, now=now)
        except PickError:
            return None  # the refusal must have the format of the request's API
        picker.detach(pick, now=now)
        return _answer(pick, reserved=head.reserved, clear_route_cache=settings.clear_route_cache)


def _answer(pick: Pick, *, reserved: tuple[str, ...], clear_route_cache: bool) -> Answer:
    """Return the same answer as `stream` gives."""
    named = ",".join(map(str, pick.destinations))
    headers = ((DESTINATION, named), *pick.set_headers)
    return Answer(
        Slot.REQUEST_HEADERS,
        set_headers=headers,
        remove_headers=not_set(reserved, headers),
        clear_route_cache=clear_route_cache,
        destination=named,
    )
