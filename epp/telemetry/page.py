"""The three files of the live page, as they are served. Nothing is inserted here: the script fills the page
from `live`.

The content security policy of the page allows only what this address serves: no other host, no inline script,
no styles except those of the file.
"""

from __future__ import annotations

from importlib import resources
from typing import Final, NamedTuple

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


class File(NamedTuple):
    content_type: str
    body: bytes


_TYPES: Final = {"index.html": "text/html", "live.css": "text/css", "live.js": "text/javascript"}


def files() -> dict[str, File]:
    """The files by name, read once at start."""
    folder = resources.files("epp.telemetry") / "live"
    return {name: File(kind, (folder / name).read_bytes()) for name, kind in _TYPES.items()}
