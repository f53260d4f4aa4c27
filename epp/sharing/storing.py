"""Writes a picker's table as bytes, for pickers that start later: the chains of every endpoint, from the
least to the most recently used.

The bytes are made in portions, so that picks go on between them. The part of each endpoint shows one
consistent moment. Common heads of chains are written once, as in batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from epp.picker import Picker
from epp.sharing.batches import (
    MOST_BYTES,
    Batch,
    Charged,
    Event,
    Flag,
    Held,
    Sized,
    StoredTable,
    encode,
)
from epp.sharing.dictionary import SpeakerDictionary
from epp.sharing.speaker import identity_of

_PORTION: Final = 200
"""Most chains of one portion. It takes a few milliseconds to write and to load."""
_PORTION_BYTES: Final = 2**18
"""Most bytes of their hashes. A very long chain is a portion of its own."""


class TableWriter:
    """Iterate over `portions` to the end, then call `data`."""

    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self._portions: list[bytes] = []
        self._dictionary = SpeakerDictionary()
        self._fresh = True

    def portions(self) -> Iterator[None]:
        for state in list(self._picker.fleet.states()):
            name = state.endpoint.name
            if self._picker.fleet.get(name) is not state:
                continue
            table = self._picker.table
            counter = state.metrics.prompt_tokens if state.metrics else None
            index = self._dictionary.name(name, identity_of(state))
            events: list[Event] = [
                Sized(
                    endpoint=index,
                    capacity_bytes=min(MOST_BYTES, table.capacity_bytes(name)),
                    prompt_tokens=counter,
                )
            ]
            taken_bytes = 0
            for chain, size_bytes in table.uses(name):
                if len(events) >= _PORTION or taken_bytes >= _PORTION_BYTES:
                    self._cut(events)
                    yield
                    index = self._dictionary.name(name, identity_of(state))
                    events, taken_bytes = [], 0
                if chain:
                    head, tail = self._dictionary.chain(chain)
                    taken_bytes += len(tail)
                    events.append(Held(age_ms=0, endpoint=index, head=head, tail=tail))
                else:
                    events.append(Charged(endpoint=index, size_bytes=min(MOST_BYTES, size_bytes)))
            self._cut(events)
            yield

    def data(self) -> bytes:
        return encode(StoredTable(batches=self._portions))

    def _cut(self, events: list[Event]) -> None:
        flags, names = int(Flag.FRESH if self._fresh else 0), self._dictionary.new_names()
        self._portions.append(
            encode(Batch(speaker=b"", number=0, hello=0, flags=flags, newest=0, names=names, events=events))
        )
        self._fresh = self._dictionary.full
        if self._fresh:
            self._dictionary = SpeakerDictionary()
