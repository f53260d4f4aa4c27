"""The interface of an entry, for the fuzzer."""

from collections.abc import Sequence
from typing import Protocol


class Entry(Protocol):
    """One way into the picker, with the parts behind it."""

    seeds: Sequence[bytes]
    """Valid inputs."""
    words: Sequence[bytes]
    """Pieces that have a meaning at this entry."""

    documents: Sequence[object]
    """Valid inputs as values of JSON or msgpack. Empty if the entry has no such format."""

    def encode(self, document: object, /) -> bytes:
        """Return a document in the format of this entry."""

    async def feed(self, data: bytes) -> bool:
        """Return True if the input was accepted, False if it was refused with this entry's own error.
        Anything else is a finding.
        """

    async def check(self) -> None:
        """Assert the invariants of the parts behind the entry, and the bounds of what they hold."""
