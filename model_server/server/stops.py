"""Ends an answer where a stop string first appears. A stream never shows the beginning of a stop string.

Text comes in pieces that may be cut anywhere, so text that could still become a stop string is held back
until this is decided. If several stop strings complete with the same piece, the stop string that starts first
ends the answer. This module does no I/O. Caller: the driver.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopRule:
    strings: tuple[str, ...]
    include: bool = False
    """True means that the answer shows the stop string too."""

    def __post_init__(self) -> None:
        if not all(self.strings):
            raise ValueError("a stop string has at least one character")


class StopFilter:
    """Filters one answer's text before it is sent."""

    __slots__ = ("_held", "_rule", "stopped_by")

    def __init__(self, rule: StopRule) -> None:
        self._rule = rule
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that has ended the answer."""

    @property
    def stopped(self) -> bool:
        return self.stopped_by is not None

    def feed(self, piece: str) -> str:
        """Return the text that can be shown after this piece. `stopped` becomes true when the piece
        completes a stop string.
        """
        assert not self.stopped, "the answer has ended"
        text = self._held + piece
        found = [(at, stop) for stop in self._rule.strings if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            self.stopped_by = stop
            self._held = ""
            return text[: at + len(stop) if self._rule.include else at]
        undecided = max((_overlap(text, stop) for stop in self._rule.strings), default=0)
        self._held = text[len(text) - undecided :]
        return text[: len(text) - undecided]

    def flush(self) -> str:
        """Return the text that was held back, because the answer has ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which `stop` begins. The length is less than that
    of `stop`.
    """
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[len(text) - n :])), 0)
