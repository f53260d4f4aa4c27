"""Finds the `model` field of a multipart form, so that uploads go to servers of their model. Pure; called by
`parse` and `rewriting`.
"""

from __future__ import annotations

import re
from typing import Final

from epp.request.client_names import MAX_NAME_CHARS

_SEARCHED_BYTES: Final = 32_768
"""The field is looked for in so many bytes at the start and at the end of a form. The file may be long, and
the fields stand before or after it."""
_MODEL: Final = re.compile(
    # Each repetition is bounded or ends at a line, so the time is proportional to the bytes.
    rb'\r\ncontent-disposition:[^\r\n]*;[ \t]*name="?model"?[ \t]*(?:;[^\r\n]*)?\r\n'
    rb"(?:[^\r\n]{1,256}\r\n){0,8}\r\n([^\r\n]{1,%d})\r\n--" % MAX_NAME_CHARS,
    re.IGNORECASE,
)


def is_form(body: bytes | memoryview) -> bool:
    return bytes(body[:2]) == b"--"


def place_of_model(body: bytes | memoryview) -> tuple[int, int] | None:
    """Return where the value of the form's `model` begins and ends. None: not found."""
    for start in (0, max(0, len(body) - _SEARCHED_BYTES)):
        found = _MODEL.search(bytes(body[start : start + _SEARCHED_BYTES]))
        if found is not None:
            return start + found.start(1), start + found.end(1)
    return None
