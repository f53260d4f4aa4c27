"""Holds the order in which a node's tokens are stored, as a mapping list. `slots[token]` is the place at
which a token of the node is stored. All other code keeps tokens in their logical order: prefixes are matched
and attention is computed only by logical position. The order is a permutation of the node's own tokens, and
never moves a token to another node. This module does no I/O. Callers: the segment writer, the reader of
selected tokens, what requests have shown (`learnt`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenOrder:
    slots: tuple[int, ...]

    @classmethod
    def logical(cls, num_tokens: int) -> TokenOrder:
        return cls(tuple(range(num_tokens)))

    @classmethod
    def by_importance(cls, importance: Sequence[float]) -> TokenOrder:
        """Return the layout with the most important tokens first, and equally important tokens in logical
        order. So any number of the most important tokens lies in the fewest chunks.
        """
        stored = sorted(range(len(importance)), key=lambda token: -importance[token])
        return cls(tuple(cls(tuple(stored)).stored()))

    def stored(self) -> list[int]:
        """Return the token at each slot, which is the inverse of `slots`."""
        tokens = [0] * len(self.slots)
        for token, slot in enumerate(self.slots):
            tokens[slot] = token
        return tokens

    def pack(self, records: bytes | memoryview, *, record_bytes: int) -> bytes:
        """Take records in logical order, and return them in stored order."""
        return _gather(records, self.stored(), record_bytes)

    def unpack(self, stored: bytes | memoryview, *, record_bytes: int) -> bytes:
        """Take records in stored order, and return them in logical order."""
        return _gather(stored, self.slots, record_bytes)

    def check_integrity(self) -> None:
        assert sorted(self.slots) == list(range(len(self.slots))), "the mapping list is a permutation"


def _gather(records: bytes | memoryview, places: Sequence[int], record_bytes: int) -> bytes:
    view = memoryview(records)
    assert len(view) == len(places) * record_bytes, "one record for each token"
    return b"".join([view[place * record_bytes : (place + 1) * record_bytes] for place in places])
