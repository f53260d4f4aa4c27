"""What an entry is, to the fuzzer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Entry(Protocol):
    """One way into the picker, with what is behind it."""

    seeds: Sequence[bytes]
    """Valid inputs."""
    words: Sequence[bytes]
    """Pieces that mean something here."""

    documents: Sequence[object]
    """Valid inputs as values of JSON or msgpack; none where the entry has no such format."""

    def encode(self, document: object, /) -> bytes:
        """A document as this entry has it."""

    async def feed(self, data: bytes) -> bool:
        """True: it was taken; False: refused with the error that is this entry's own.
        Anything else is a finding."""

    async def check(self) -> None:
        """Assert the invariants of what is behind it, and the bounds of what it holds."""
