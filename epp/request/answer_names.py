"""Replaces the name of the target model by the name that the client sent, in an answer that streams through
the picker.

This is done only for answers that pass the picker anyway. The search is for `"model":"NAME"` as servers write
it, with or without a space after the colon, also across the borders of pieces. Quotes inside generated text
are escaped, so generated text never matches. Pure; `epp.protocol.answer_body` owns one for each such answer.
"""

from __future__ import annotations

from typing import Final

import msgspec

_KEY: Final = b'"model"'
_KEYS: Final = (_KEY + b":", _KEY + b": ")
_READABLE: Final = ("application/json", "text/event-stream")


class AnswerNames:
    """Pass every piece to `feed`, and send on what it returns. Holds back less than a name's length."""

    def __init__(self, *, served: str, asked: str) -> None:
        old, new = msgspec.json.encode(served), msgspec.json.encode(asked)
        self._names = tuple((key + old, key + new) for key in _KEYS)
        self._held = b""

    def feed(self, data: bytes | memoryview, *, end: bool) -> bytes:
        """Return the bytes to send on now. end: no more bytes will come."""
        text = self._held + bytes(data)
        for old, new in self._names:
            text = text.replace(old, new)
        cut = len(text) if end else self._cut(text)
        self._held = text[cut:]
        return text[:cut]

    def _cut(self, text: bytes) -> int:
        """Return where the last bytes begin that may be the beginning of a name."""
        start = text.rfind(_KEY, max(0, len(text) - len(self._names[-1][0])))
        if start >= 0 and any(old.startswith(text[start:]) for old, _ in self._names):
            return start
        for size in range(len(_KEY) - 1, 0, -1):
            if text.endswith(_KEY[:size]):
                return len(text) - size
        return len(text)


def readable(headers: dict[str, str]) -> bool:
    """Return whether an answer with these headers has its model in plain JSON."""
    return not headers.get("content-encoding", "") and headers.get("content-type", "").startswith(_READABLE)
