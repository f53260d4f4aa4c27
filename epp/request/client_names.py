"""Names that clients choose, and where they stand: models, adapters, cache salts, sessions, the `model` of a
form, and the ids of what one server keeps. A long name is replaced by a digest when it is read. Pure.

Other modules use names as keys and labels, and keep some of them after the request has ended. A client may
send a name of many megabytes. So no other module ever gets a name of more than `MAX_NAME_CHARS` + 1
characters.

The server that made a stored response, a conversation, a file or a batch is the only one that knows its id. A
request names the id in its path (`GET /v1/responses/ID`) or in its body (`previous_response_id`,
`conversation`, `input_file_id`). `picker.remembered` remembers which server it was.
"""

import re
from hashlib import blake2b
from typing import Final

MAX_NAME_CHARS: Final = 1024
"""The endpoints file allows no longer names of adapters. So no server has a longer name."""

MAX_TENANT_CHARS: Final = 255
"""Longest name of a tenant. Tenants' names go to other pickers, which accept at most one character more."""


def bounded_name(name: str, *, most_chars: int = MAX_NAME_CHARS) -> str:
    """Return the name itself. For a long name: its beginning and a digest, one character longer than any
    name that is kept.
    """
    if len(name) <= most_chars:
        return name
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{name[: most_chars - len(digest)]}~{digest}"


def is_digest(name: str) -> bool:
    """Return whether `bounded_name` replaced the name that was sent."""
    return len(name) > MAX_NAME_CHARS


_COLLECTIONS: Final = ("/v1/responses", "/v1/conversations", "/v1/files", "/v1/batches")

_CALLS: Final = ("render", "input_tokens")
"""What stands in the place of an id and is none."""
_MOST_PREFIX: Final = 4
"""Most parts of a path that a gateway may put before the API's own."""


def id_in_path(path: str) -> str:
    """Return the id that a path names. Empty: it names none."""
    plain = path.partition("?")[0]
    for collection in _COLLECTIONS:
        before, found, after = plain.partition(collection + "/")
        if found and before.count("/") <= _MOST_PREFIX:
            name = after.partition("/")[0]
            return bounded_name(name) if name not in _CALLS else ""
    return ""


def makes_state(path: str) -> bool:
    """Return whether a POST to this path makes an object, whose id its answer has."""
    return path.partition("?")[0].rstrip("/").endswith(_COLLECTIONS)


_SEARCHED_BYTES: Final = 32_768
"""The field is looked for in so many bytes at the start and at the end of a form. The file may be long, and
the fields stand before or after it."""
_FORM_MODEL: Final = re.compile(
    # Each repetition is bounded or ends at a line, so the time is proportional to the bytes.
    rb'\r\ncontent-disposition:[^\r\n]*;[ \t]*name="?model"?[ \t]*(?:;[^\r\n]*)?\r\n'
    rb"(?:[^\r\n]{1,256}\r\n){0,8}\r\n([^\r\n]{1,%d})\r\n--" % MAX_NAME_CHARS,
    re.IGNORECASE,
)


def is_form(body: bytes | memoryview) -> bool:
    return bytes(body[:2]) == b"--"


def model_in_form(body: bytes | memoryview) -> tuple[int, int] | None:
    """Return where the value of the form's `model` begins and ends. None: not found."""
    for start in (0, max(0, len(body) - _SEARCHED_BYTES)):
        found = _FORM_MODEL.search(bytes(body[start : start + _SEARCHED_BYTES]))
        if found is not None:
            return start + found.start(1), start + found.end(1)
    return None
