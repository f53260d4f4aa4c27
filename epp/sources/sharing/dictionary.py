"""Shortens batches: later batches of a picker leave out names of endpoints and heads of chains that earlier
batches contained.

A chain is sent as the last hash that was sent before, followed by its new hashes. The speaker keeps the set
of hashes that it has sent. The listener keeps the parent of each hash. Both depend only on the batches since
the last fresh one. So they agree as long as no batch was missed, and the numbers of the batches show whether
one was missed.

Invariant of the speaker's side: if a hash was sent, every hash before it in its chain was sent too, so
bisection finds the last hash that was sent. Hashes are not cryptographic, and clients choose prompts. If two
chains have an equal hash, the listener gets a chain that no server has. This costs some matches and nothing
else, because the walk over the chain is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain as chained
from typing import Final

from epp.sources.sharing.batches import HASH_BYTES, MOST_NAMES, pack_hashes, unpack_hashes

MOST_HASHES: Final = 32_768
"""After this many hashes the speaker starts a new dictionary. They take about 3 MB on either side."""
MOST_CHUNKS: Final = 16_384
"""Most chunks of one chain: 16 MB of prompt by the default policy. Further chunks are left out, so that no
event costs more than some milliseconds."""


class SpeakerDictionary:
    """The speaker's side of the dictionary."""

    def __init__(self) -> None:
        self._hashes: set[int] = set()
        self._names: dict[tuple[str, int], int] = {}
        self._new: list[tuple[str, int]] = []

    @property
    def full(self) -> bool:
        """Whether to start a new dictionary with the next batch."""
        return len(self._hashes) > MOST_HASHES or len(self._names) > MOST_NAMES // 2

    def name(self, name: str, identity: int) -> int:
        """Return the index of a name. A new name goes into this batch."""
        key = (name, identity)
        index = self._names.get(key)
        if index is None:
            index = self._names[key] = len(self._names)
            self._new.append(key)
        return index

    def new_names(self) -> list[tuple[str, int]]:
        new, self._new = self._new, []
        return new

    def chain(self, chain: Sequence[int]) -> tuple[bytes, bytes]:
        """Return the head and tail of a chain, for a batch. From now on the whole chain counts as sent."""
        known = self._num_sent(chain)
        tail = chain[known:]
        self._hashes.update(tail)
        return pack_hashes(chain[known - 1 : known]) if known else b"", pack_hashes(tail)

    def _num_sent(self, chain: Sequence[int]) -> int:
        """Return the number of leading hashes that were sent before."""
        hashes, low, high = self._hashes, 0, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in hashes:
                low = middle
            else:
                high = middle - 1
        return low


class ListenerDictionary:
    """The listener's side of one speaker's dictionary."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}
        self._names: list[tuple[str, int]] = []

    def add_names(self, names: Sequence[tuple[str, int]]) -> None:
        self._names.extend(names[: max(0, MOST_NAMES - len(self._names))])

    def name(self, index: int) -> tuple[str, int] | None:
        """Return the name of an index. None: the index was never sent."""
        return self._names[index] if 0 <= index < len(self._names) else None

    def chain(self, head: bytes, tail: bytes) -> list[int] | None:
        """Return the whole chain. None: its head is unknown. Raises MalformedError."""
        if not head:
            hashes = unpack_hashes(tail[: MOST_CHUNKS * HASH_BYTES])
            self._learn(0, hashes)
            return hashes
        at = int.from_bytes(head, "little")
        whole = self._back_from(at)
        if whole is None or len(head) != HASH_BYTES:
            return None
        hashes = unpack_hashes(tail[: (MOST_CHUNKS - len(whole)) * HASH_BYTES])
        self._learn(at, hashes)
        whole += hashes
        return whole

    def _learn(self, parent: int, hashes: list[int]) -> None:
        if len(self._parents) <= 2 * MOST_HASHES + MOST_CHUNKS:
            self._parents.update(zip(hashes, chained((parent,), hashes), strict=False))

    def _back_from(self, at: int) -> list[int] | None:
        """Return the chain that ends in this hash, by its parents. 0 stands before the first hash."""
        parents = self._parents
        whole: list[int] = []
        while at:
            if len(whole) >= MOST_CHUNKS:
                return None
            whole.append(at)
            parent = parents.get(at)
            if parent is None:
                return None
            at = parent
        whole.reverse()
        return whole
