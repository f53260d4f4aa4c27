"""Computes how many tokens of a prompt are complete at a position in the canonical prompt.

Chunks end at bytes of the canonical prompt, and blocks end at tokens of the rendered prompt. Each text of a
conversation is searched in the output of the template, in order. Between two texts, and where a template
rewrites a text, positions are interpolated. An error of a few tokens there moves the end of a chunk by at
most one block.

Pure. Callers: `mapping`, tests.
"""

from __future__ import annotations

from bisect import bisect_right
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from epp.kvevents.conversation import Text
from epp.prefix_index.hashing import ChunkSchedule

_MOST_MISSED: Final = 256
"""Most texts that may not be found. Each costs a search through the whole prompt. After that, positions are
interpolated."""


def chunk_ends(schedule: ChunkSchedule, count: int) -> list[int]:
    """Bytes of the prompt that the first 1, 2, ... chunks cover."""
    return [schedule.end_bytes(k + 1) for k in range(count)]


def whole_blocks(
    ends_bytes: Sequence[int], *, bytes_per_token: int, block_tokens: int, blocks: int
) -> list[int]:
    """Number of blocks complete at the end of each chunk, for a prompt that came as token ids."""
    return [min(end // (bytes_per_token * block_tokens), blocks) for end in ends_bytes]


@dataclass(frozen=True, slots=True)
class Rendered:
    """The server's version of a prompt of text."""

    text: str
    token_ends: Sequence[int]
    """Where each token ends in `text`, in characters, in ascending order."""
    texts: Sequence[Text]
    """The texts of the prompt."""
    prompt_bytes: int
    plain_chars: int
    """Number of leading characters that are the same without the request's own arguments, which the chunks do
    not contain. The blocks of later chunks are not computed."""


def aligned_blocks(
    ends_bytes: Sequence[int], rendered: Rendered, *, block_tokens: int, blocks: int
) -> list[int]:
    """The same for a prompt of text, for the chunks that end within `plain_chars`."""
    anchors = _anchors(rendered.prompt_bytes, rendered.text, rendered.texts)
    found, at = [], 0
    for end in ends_bytes:
        while anchors[at + 1].prompt_end < end:
            at += 1
        chars = anchors[at + 1].place(end, after=anchors[at])
        if chars > rendered.plain_chars:
            break
        found.append(min(bisect_right(rendered.token_ends, chars) // block_tokens, blocks))
    return found


class _Characters:
    """Number of whole characters in the first bytes of a text, for growing numbers of bytes. Each byte is
    looked at once.
    """

    __slots__ = ("_bytes", "_chars", "_decoder", "_seen")

    def __init__(self, text: str) -> None:
        self._bytes = text.encode()
        self._decoder = getincrementaldecoder("utf-8")()
        self._seen = self._chars = 0

    def within(self, num_bytes: int) -> int:
        self._chars += len(self._decoder.decode(self._bytes[self._seen : num_bytes]))
        self._seen = max(self._seen, num_bytes)
        return self._chars


class _Anchor:
    """A text that was found in the rendered prompt, or one of its two ends: where it begins and ends in both.
    Places must be asked for in ascending order.
    """

    __slots__ = ("_count", "prompt_end", "prompt_start", "rendered_end", "rendered_start", "text")

    def __init__(self, text: Text, rendered_start: int, rendered_end: int) -> None:
        self.text = text
        self.prompt_start, self.prompt_end = text.start, text.end
        self.rendered_start, self.rendered_end = rendered_start, rendered_end
        self._count: _Characters | None = None

    def place(self, byte: int, *, after: _Anchor) -> int:
        """The place in `rendered`, in characters, of a place that comes after the text before and not after
        this text's end.
        """
        if byte < self.prompt_start:
            gap = self.prompt_start - after.prompt_end
            share = (byte - after.prompt_end) / gap if gap else 0.0
            return after.rendered_end + int(share * (self.rendered_start - after.rendered_end))
        into, text = byte - self.prompt_start, self.text.text
        if self.prompt_end - self.prompt_start != len(text):  # not ASCII: characters of several bytes
            self._count = self._count or _Characters(text)
            into = self._count.within(into)
        return min(self.rendered_start + into, self.rendered_end)


def _anchors(prompt_bytes: int, rendered: str, texts: Sequence[Text]) -> list[_Anchor]:
    """The beginning, every text that was found, and the end."""
    anchors = [_Anchor(Text(0, "", 0), 0, 0)]
    at = missed = 0
    for text in texts:
        if missed > _MOST_MISSED:
            break
        said, start = text.text, rendered.find(text.text, at)
        if start < 0:  # many templates strip white space
            said = text.text.strip()
            start = rendered.find(said, at)
            if start < 0 or not said:
                missed += 1
                continue
            lead = len(text.text) - len(text.text.lstrip())
            skipped = len(text.text[:lead].encode())
            text = Text(text.start + skipped, said, text.start + skipped + len(said.encode()))  # noqa: PLW2901 - the part of it that is there
        if not said:
            continue
        at = start + len(said)
        anchors.append(_Anchor(text, start, at))
    anchors.append(_Anchor(Text(prompt_bytes, "", prompt_bytes), len(rendered), len(rendered)))
    return anchors
