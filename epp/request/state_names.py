"""Finds the ids of what one server keeps: stored responses, conversations, files and batches.

The server that made such an object is the only one that knows its id. A request names the id in its path
(`GET /v1/responses/ID`, `POST /v1/responses/ID/cancel`) or in its body (`previous_response_id`,
`conversation`, `input_file_id`). `picker.kept_state` remembers which server it was. Pure.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw, Struct

from epp.request.client_names import bounded_name, name_in
from epp.request.jsontext import NO_RAW, first_byte

_BRACE: Final = ord("{")
_COLLECTIONS: Final = ("/v1/responses", "/v1/conversations", "/v1/files", "/v1/batches")

_MOST_PREFIX: Final = 4
"""Most parts of a path that a gateway may put before the API's own."""


class _Named(Struct, gc=False):
    id: Raw = NO_RAW


_DECODE_NAMED: Final = msgspec.json.Decoder(_Named)


def id_in_path(path: str) -> str:
    """Return the id that a path names. Empty: it names none."""
    plain = path.partition("?")[0]
    for collection in _COLLECTIONS:
        before, found, after = plain.partition(collection + "/")
        if found and before.count("/") <= _MOST_PREFIX:
            return bounded_name(after.partition("/")[0])
    return ""


def makes_state(path: str) -> bool:
    """Return whether a POST to this path makes an object, whose id its answer has."""
    return path.partition("?")[0].rstrip("/").endswith(_COLLECTIONS)


def id_in_body(*values: Raw) -> str:
    """Return the first id in these fields of a body: a text, or an object with an `id`. Empty: there is none.
    Raises DecodeError if a field is malformed.
    """
    for value in values:
        if name := name_in(value):
            return name
        if first_byte(value) == _BRACE and (name := name_in(_DECODE_NAMED.decode(value).id)):
            return name
    return ""
