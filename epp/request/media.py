"""First guesses at the tokens of media, by the size of a picture or the length of a recording.

`TokenEstimate` learns from `usage` by which factor a model differs in each kind, so a guess has to be in
proportion, not right. Pictures: a token for each square of 28 pixels, 4 to 16,384 in all (Qwen2-VL,
`min_pixels` and `max_pixels`). Sound: 25 tokens a second (Qwen2-Audio), at the rate in a WAV's header or at
128 kbit/s. Films: 256 tokens a second, at 2 Mbit/s. Only headers are decoded: a JPEG's size is searched in
its first `_MOST_SEGMENTS` segments, and a picture with JSON's escaped slash in the base64 of its header
counts as `UNKNOWN_TOKENS`. All media of a request together count as at most `MOST_TOKENS`. Pure. Called by
`canonical` and `parse`.
"""

import binascii
import re
from struct import unpack_from
from typing import Final

from msgspec import Raw

from epp.base.types import Media

UNKNOWN_TOKENS: Final = 1024
"""The guess for media of unknown size (900 x 900 pixels), and for a stored conversation."""
SOUND_BYTES: Final = 640
"""Bytes for each token of sound."""
_FILM_BYTES: Final = 1000
MOST_TOKENS: Final = 16_384
"""Most guessed tokens of one request, so that a few bytes book no huge backlog."""
_SHOWN: Final = re.compile(rb"^$|image|audio|video|document|file")  # others, as tool_reference, are texts
_SQUARE: Final = 28
_DATA: Final = re.compile(rb';base64,|"data"\s*:\s*"')
_TEXT: Final = re.compile(rb'"media_type"\s*:\s*"text/|data:text/')  # of a document or file
_SEARCHED_BYTES: Final = 512
_HEADER_BYTES: Final = 32
_MOST_SEGMENTS: Final = 12


def media_tokens(part: Raw, *, kind: bytes, measured: bool) -> Media:
    """Return the guess for a part of a content. kind: its type. measured: by its header, if it has one."""
    view = memoryview(part)
    start = bytes(view[:_SEARCHED_BYTES])
    both = start + bytes(view[-_SEARCHED_BYTES:])
    text = measured and (b"document" in kind or b"file" in kind) and _TEXT.search(both)
    found = _DATA.search(start) if measured and not text else None
    if found is None and (text or not _SHOWN.search(kind)):
        return Media(texts=1 + len(view) // 4)
    tokens = _measured(view[found.end() :], kind) if found else UNKNOWN_TOKENS
    if b"audio" in kind:
        return Media(sound=tokens)
    return Media(films=tokens) if b"video" in kind else Media(pictures=tokens)


def _measured(data: memoryview, kind: bytes) -> int:
    """Return the tokens of a sound, film or picture. data: base64, and what follows it in the body."""
    head, size = _decoded(data, 0, _HEADER_BYTES), len(data) * 3 // 4
    if b"audio" in kind:
        rate = unpack_from("<I", head, 28)[0] if head[8:12] == b"WAVE" and len(head) == _HEADER_BYTES else 0
        return 1 + (25 * size // rate if rate else size // SOUND_BYTES)
    if b"video" in kind:
        return 1 + size // _FILM_BYTES
    width, height = _pixels(data, head) if len(head) == _HEADER_BYTES else (0, 0)
    squares = -(-width // _SQUARE) * -(-height // _SQUARE)
    return max(4, squares) if squares else UNKNOWN_TOKENS


def _pixels(data: memoryview, head: bytes) -> tuple[int, ...]:
    """Return width and height of a picture. 0, 0: its format is not known."""
    if head[:4] == b"\x89PNG":
        return unpack_from(">II", head, 16)
    if head[:4] == b"GIF8":
        return unpack_from("<HH", head, 6)
    if head[8:16] == b"WEBPVP8 ":
        return tuple(side & 0x3FFF for side in unpack_from("<HH", head, 26))
    if head[8:16] == b"WEBPVP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if head[8:16] == b"WEBPVP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    at = 2
    for _ in range(_MOST_SEGMENTS if head[:2] == b"\xff\xd8" else 0):
        segment = _decoded(data, at, 9)
        if len(segment) < 9 or segment[0] != 0xFF:
            break
        if 0xC0 <= segment[1] <= 0xCF and segment[1] not in (0xC4, 0xC8, 0xCC):
            return unpack_from(">HH", segment, 5)
        at += 2 + unpack_from(">H", segment, 2)[0]
    return 0, 0


def _decoded(data: memoryview, at: int, count: int) -> bytes:
    """Return `count` bytes of base64 from a place on. Fewer: the data ends, or is no base64."""
    start = at // 3 * 4
    try:
        return binascii.a2b_base64(data[start : start + 4 * (count // 3 + 2)])[at % 3 :][:count]
    except binascii.Error:
        return b""
