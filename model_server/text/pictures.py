"""Pictures in the prompts of a made-up model: each is a text of as many tokens as the picture takes. The text
depends on the picture, so the cache finds it only where the same picture stood. Pure. Caller: `prompts`.
"""

import binascii
import re
from typing import Final, Literal

import xxhash

_UNKNOWN_TOKENS: Final = 1024
"""Tokens of a picture behind a URL, which is never opened, and of a format that is not known here."""
_MOST_TOKENS: Final = 16_384
_SQUARE: Final = 28
"""A picture has a token for each square of so many pixels, and at least 4, as in Qwen2-VL."""
_HEADER_CHARACTERS: Final = 2**17
_SIDES: Final[tuple[tuple[re.Pattern[bytes], Literal["big", "little"]], ...]] = (
    (re.compile(rb"\x89PNG.{12}(.{4})(.{4})", re.DOTALL), "big"),
    (re.compile(rb"GIF8..(..)(..)", re.DOTALL), "little"),
    # The last header of a JPEG: an earlier one is of the small picture in it.
    (re.compile(rb"\xff\xd8.*\xff[\xc0-\xc2]\0.\x08(..)(..)", re.DOTALL), "big"),
)


def picture_text(url: str) -> str:
    """Return the text that stands for a picture. The URL may hold the data, in base64."""
    data = url.partition(";base64,")[2]
    tokens = min(_MOST_TOKENS, max(4, _squares(data))) if data else _UNKNOWN_TOKENS
    digits = f"{xxhash.xxh3_128_intdigest((data or url).encode()):039}"
    return "<|image|>" + (digits * (tokens // 13 + 1))[: 3 * tokens]  # a token has three digits


def _squares(data: str) -> int:
    try:
        head = binascii.a2b_base64(data[:_HEADER_CHARACTERS])
    except ValueError:
        return _UNKNOWN_TOKENS
    for pattern, order in _SIDES:
        if found := pattern.match(head):
            one, other = (-(-int.from_bytes(side, order) // _SQUARE) for side in found.groups())
            return one * other
    return _UNKNOWN_TOKENS
