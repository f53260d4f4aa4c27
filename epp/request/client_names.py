"""Names that clients choose: models, adapters, cache salts, sessions. A long name is replaced by a digest
when it is read.

Other modules use names as keys and labels, and keep some of them after the request has ended. A client may
send a name of many megabytes. So no other module ever gets a name of more than `MAX_NAME_CHARS` + 1
characters. Called by `parse` for the body's fields and by `protocol` for headers.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Raw

MAX_NAME_CHARS: Final = 1024
"""The endpoints file allows no longer names of adapters. So no server has a longer name."""

MAX_TENANT_CHARS: Final = 255
"""Longest name of a tenant. Tenants' names go to other pickers, which accept at most one character more."""

_DIGEST_BYTES: Final = 16
_MOST_JSON_BYTES: Final = 12 * MAX_NAME_CHARS + 2
"""Longest JSON of a name that is kept: each letter may be two escapes."""
_DECODE = msgspec.json.Decoder(str)


def bounded_name(name: str, *, most_chars: int = MAX_NAME_CHARS) -> str:
    """Return the name itself. For a long name: its beginning and a digest, one character longer than any
    name that is kept.
    """
    if len(name) <= most_chars:
        return name
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{name[: most_chars - len(digest)]}~{digest}"


def name_in(value: Raw) -> str | None:
    """Return a JSON string as a name. None: it is not a string. A long name is not decoded. Raises
    DecodeError if the string is malformed.
    """
    json = memoryview(value)
    if not json or json[0] != ord('"'):
        return None
    if len(json) <= _MOST_JSON_BYTES:
        return bounded_name(_DECODE.decode(value))
    start = bytes(json[1:MAX_NAME_CHARS]).decode("ascii", "replace")
    return bounded_name(start + blake2b(json, digest_size=_DIGEST_BYTES).hexdigest())


def is_digest(name: str) -> bool:
    """Return whether `bounded_name` replaced the name, so that the name as it was sent is not known any
    more.
    """
    return len(name) > MAX_NAME_CHARS
