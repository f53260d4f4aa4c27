"""What a stream and its picker reported, kept for tests: a listener to the picker's events."""

from __future__ import annotations

from dataclasses import dataclass, field

from epp.base.errors import PickError
from epp.picker.events import Answered, Began, Ended, Pick, PickerEvent, ProtocolFault, Refused
from epp.picker.picker import Picker


@dataclass
class Seen:
    picks: list[Pick] = field(default_factory=list)
    over: list[Pick] = field(default_factory=list)
    mismatches: list[bool] = field(default_factory=list)
    refusals: list[tuple[str, PickError]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, picker: Picker) -> Seen:
        """Make a listener that listens to the picker from now on."""
        seen = cls()
        picker.subscribe(seen.on_event)
        return seen

    def on_event(self, event: PickerEvent) -> None:
        if isinstance(event, Began):
            self.picks.append(event.pick)
        elif isinstance(event, Answered):
            self.mismatches.append(event.mismatch)
        elif isinstance(event, Ended):
            self.over.append(event.pick)
        elif isinstance(event, Refused):
            self.refusals.append((event.request_id, event.error))
        elif isinstance(event, ProtocolFault):
            assert event.reason
            self.faults.append(event.reason)
