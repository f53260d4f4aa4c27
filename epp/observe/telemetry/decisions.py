"""Keeps the last decisions, which show why a request went to its server.

The decisions are a bounded ring in order of time. Clients choose request ids, so an id may come twice: both
decisions stay in the ring, and the id finds the later one. Filled by `metrics`, shown by `admin`. A decision
is completed while its answer comes, so the ring keeps the live record and not a copy.
"""

from collections import deque
from itertools import islice
from typing import Any, Final

import msgspec
from msgspec import Struct

from epp.base.types import Address
from epp.picker.decision import Decision

_MAX_TEXT_CHARS: Final = 512


class RefusalRecord(Struct, frozen=True, gc=False):
    """A request that got no endpoint."""

    request_id: str
    at_unix_s: float
    status: int
    reason: str
    message: str
    outcome: str = "refused"


Record = Decision | RefusalRecord


class DecisionRing(deque[Record]):
    """The last `maxlen` records, the newest at the end. 0 keeps none."""

    def get(self, request_id: str) -> Record | None:
        """Return the newest record of that id, if it is still kept. Walks the ring: only people ask."""
        return next((record for record in reversed(self) if record.request_id == request_id), None)

    def last(self, limit: int, *, endpoint: str = "") -> list[Record]:
        """Return the newest records first, at most `limit`. endpoint: only those that chose it."""
        found = (
            record
            for record in reversed(self)
            if not endpoint or (isinstance(record, Decision) and record.chosen == endpoint)
        )
        return list(islice(found, limit))


def as_json(record: Record) -> dict[str, Any]:
    """Return the record as JSON values. Addresses are `ip:port`, and text that is not valid UTF-8 is
    replaced.
    """
    shown: dict[str, Any] = facts(record)
    if isinstance(record, Decision):
        shown["candidates"] = [facts(candidate) for candidate in record.candidates]
        shown["destinations"] = [str(address) for address in record.destinations]
    return shown


def facts(record: Struct) -> dict[str, Any]:
    """Return the fields of a record or a candidate, without its candidates and destinations."""
    names = (name for name in record.__struct_fields__ if name not in ("candidates", "destinations"))
    return {name: _plain(getattr(record, name)) for name in names}


def _plain(value: object) -> object:
    if isinstance(value, Address):
        return str(value)
    return printable(value) if isinstance(value, str) else value


def printable(text: str) -> str:
    """Return a client's text, cut and made valid: lone surrogates of JSON strings are not UTF-8."""
    return text[:_MAX_TEXT_CHARS].encode("utf-8", "replace").decode()


def encode(value: object) -> bytes:
    """Return JSON, indented for people. Numbers that JSON lacks become null."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
