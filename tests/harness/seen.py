"""What a stream and its picker reported, kept for tests: the observer of streams and a listener to the
picker's events.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from epp.errors import PickError
from epp.picker import Picker
from epp.picker_events import Answered, Began, Ended, Pick, PickerEvent


@dataclass
class Seen:
    picks: list[Pick] = field(default_factory=list)
    over: list[Pick] = field(default_factory=list)
    mismatches: list[bool] = field(default_factory=list)
    refusals: list[tuple[str, PickError]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    parsed_bytes: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, picker: Picker) -> Seen:
        """Make an observer that listens to the picker from now on."""
        seen = cls()
        picker.subscribe(seen.on_event)
        return seen

    def on_event(self, event: PickerEvent) -> None:
        if isinstance(event, Began):
            self.picks.append(event.request)
        elif isinstance(event, Answered):
            self.mismatches.append(event.mismatch)
        elif isinstance(event, Ended):
            self.over.append(event.request)

    def parsed(self, *, seconds: float, size_bytes: int) -> None:
        assert seconds >= 0
        assert size_bytes > 0
        self.parsed_bytes.append(size_bytes)

    def refused(self, request_id: str, error: PickError, *, trace: str = "") -> None:
        self.refusals.append((request_id, error))

    def protocol_error(self, reason: str) -> None:
        assert reason
        self.faults.append(reason)
