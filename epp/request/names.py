"""Names that clients choose: models, adapters, cache salts, sessions. A long name is replaced by a digest
when it is read.

Other modules use names as keys and labels, and keep some of them after the request has ended. A client may
send a name of many megabytes. So no other module ever gets a name of more than `MAX_NAME_CHARS` + 1
characters. Called by `parse` for the body's fields and by `extproc` for headers.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Raw

MAX_NAME_CHARS: Final = 1024
"""The endpoints file allows no longer name of an adapter, so a longer name is never one that a server has."""

MAX_TENANT_CHARS: Final = 255
"""Other pickers are told of tenants, and read no longer name than one more."""

_DIGEST_BYTES: Final = 16
_MOST_JSON_BYTES: Final = 12 * MAX_NAME_CHARS + 2
"""Of a name that is kept, with each letter written as two escapes."""
_DECODE = msgspec.json.Decoder(str)


def bounded_name(name: str, *, most_chars: int = MAX_NAME_CHARS) -> str:
    """The name itself; of a long one its beginning and a digest,
    one character longer than any name that is kept.
    """
    if len(name) <= most_chars:
        return name
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{name[: most_chars - len(digest)]}~{digest}"


def name_in(value: Raw) -> str | None:
    """A JSON string as a name; None: it is no string. DecodeError where the string is broken.
    A long one is not decoded.
    """
    json = memoryview(value)
    if not json or json[0] != ord('"'):
        return None
    if len(json) <= _MOST_JSON_BYTES:
        return bounded_name(_DECODE.decode(value))
    start = bytes(json[1:MAX_NAME_CHARS]).decode("ascii", "replace")
    return bounded_name(start + blake2b(json, digest_size=_DIGEST_BYTES).hexdigest())


def is_digest(name: str) -> bool:
    """Whether `bounded_name` replaced it, so that the name as it was sent is not known any more."""
    return len(name) > MAX_NAME_CHARS
