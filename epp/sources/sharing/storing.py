"""Writes a picker's table as bytes, for pickers that start later: the chains of every endpoint, from the
least to the most recently used.

The bytes are made in portions, so that picks go on between them. The part of each endpoint shows one
consistent moment. Common heads of chains are written once, as in batches.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

from epp.base.types import EndpointName
from epp.picker.picker import Picker
from epp.picker.prefix_index.table import PrefixTable, Run
from epp.sources.sharing.batches import MOST_BYTES, Batch, BatchFlag, Charged, Event, HeldChain, Sized, encode
from epp.sources.sharing.dictionary import SpeakerDictionary
from epp.sources.sharing.speaker import identity_of

_PORTION: Final = 200
"""Most chains of one portion. It takes a few milliseconds to write and to load."""
_PORTION_BYTES: Final = 2**18
"""Most bytes of their hashes. A very long chain is a portion of its own."""


def table_portions(picker: Picker) -> Iterator[bytes]:
    """Yield the batches of a stored table, in order. Other work may run between them."""
    dictionary, flags = SpeakerDictionary(), BatchFlag.FRESH
    for state in list(picker.fleet.states()):
        name, table = state.endpoint.name, picker.table
        if picker.fleet.get(name) is not state:
            continue
        uses, index = iter(uses_of(table, name)), dictionary.name(name, identity_of(state))
        sized = Sized(
            endpoint=index,
            capacity_bytes=min(MOST_BYTES, table.mirrors[name].capacity_bytes),
            prompt_tokens=state.metrics.prompt_tokens if state.metrics else None,
        )
        events = [sized, *_events(uses, dictionary, index)]
        while events:
            names = dictionary.new_names()
            yield encode(
                Batch(speaker=b"", number=0, hello=0, flags=flags, newest=0, names=names, events=events)
            )
            flags = BatchFlag(0)
            if dictionary.full:
                dictionary, flags = SpeakerDictionary(), BatchFlag.FRESH
            events = _events(uses, dictionary, dictionary.name(name, identity_of(state)))


def uses_of(table: PrefixTable, name: EndpointName) -> Iterator[tuple[Sequence[int], int]]:
    """Yield the calls of `record` and `charge` that would make the server's mirror again, the oldest first: a
    chain, or a number of bytes without a chain.

    The table may change between steps. Entries that are gone by then are left out, and new ones do not
    appear.
    """
    mirror = table.taking(name)
    for use in list(mirror.uses()) if mirror is not None else ():
        if use.leaf is None:
            yield (), use.size_bytes
        elif mirror is not None and mirror.last_use.get(use.leaf) is use:
            yield _whole_chain(use.leaf), 0


def _whole_chain(run: Run | None) -> array[int]:
    """Return the hashes from the chain's first chunk to the run's last."""
    parts = []
    while run is not None:
        parts.append(run.hashes)
        run = run.parent
    whole = array("Q")
    for part in reversed(parts):
        whole += part
    return whole


def _events(
    uses: Iterator[tuple[Sequence[int], int]], dictionary: SpeakerDictionary, index: int
) -> list[Event]:
    """Return the events of one portion. Empty: there are no more."""
    events: list[Event] = []
    taken_bytes = 0
    for chain, size_bytes in uses:
        if chain:
            head, tail = dictionary.chain(chain)
            taken_bytes += len(tail)
            events.append(HeldChain(age_ms=0, endpoint=index, head=head, tail=tail))
        else:
            events.append(Charged(endpoint=index, size_bytes=min(MOST_BYTES, size_bytes)))
        if len(events) >= _PORTION or taken_bytes >= _PORTION_BYTES:
            break
    return events
