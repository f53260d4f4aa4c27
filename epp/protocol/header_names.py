"""The names of the headers that the picker reads and sets. Also reads less usual headers: addresses, the
endpoints that a test prescribes, and a request's claims to flow control. Pure.

Values that cannot be read are skipped here, and `asking` decides what to do. Nothing in this module raises an
error because of a peer's bytes.
"""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from epp.base.types import SERVER_HEADERS, Address, Endpoint
from epp.config.flow import Flow
from epp.picker.gate import FlowClaim
from epp.request.client_names import MAX_TENANT_CHARS, bounded_name

DESTINATION: Final = "x-gateway-destination-endpoint"
REQUEST_ID: Final = "x-request-id"
LENGTH: Final = "content-length"
DECISION: Final = "x-prefix-gateway-decision"
TEST_SELECTION: Final = "test-epp-endpoint-selection"
TEST_SERVED: Final = "x-conformance-test-served-endpoint"

MAX_RETRIES: Final = "x-envoy-max-retries"
"""Our Envoy obeys this header and removes it."""

OBJECTIVES: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
"""Headers that name an InferenceObjective. The second is the older name."""
TTFT_MS: Final = "x-llm-d-slo-ttft-ms"

TRACEPARENT: Final = "traceparent"

RESPONSE_NAMES: Final = frozenset((":status", "content-type", "content-encoding"))
RESERVED: Final = (DESTINATION, *SERVER_HEADERS)
"""Request headers that only the picker may set."""


def read_claim(found: Mapping[str, str], flow: Flow) -> FlowClaim:
    """Return what the headers claim about a request's place in a queue. Headers that cannot be read count as
    absent.
    """
    claims = flow.claims
    milliseconds = found.get(TTFT_MS, "").strip() if "Deadline" in claims else ""
    readable = milliseconds.isascii() and milliseconds.isdigit() and len(milliseconds) < 9
    objective = next((found[name] for name in OBJECTIVES if name in found), "")
    tenant = found.get(flow.tenant_header, "")
    return FlowClaim(
        objective=bounded_name(objective.strip()) if "Objective" in claims else "",
        tenant=bounded_name(tenant.strip(), most_chars=MAX_TENANT_CHARS) if "Tenant" in claims else "",
        ttft_s=int(milliseconds) / 1000 if readable else None,
    )


_LONGEST_ADDRESS: Final = 80
"""Longer text is not an address, and is not cached."""
MOST_ADDRESSES: Final = 4_096
"""Most addresses of a subset hint. Those behind them do not count."""
_MOST_PRESCRIBED: Final = 64


def read_address(text: str) -> Address | None:
    """Return the address from `ip:port`, or None for any other text."""
    return _read_address(text) if len(text) <= _LONGEST_ADDRESS else None


@functools.lru_cache(maxsize=4096)
def _read_address(text: str) -> Address | None:
    """Read the address. The results are cached, because a fleet's addresses come again with every request."""
    try:
        return Address.parse(text)
    except ValueError:
        return None


def read_addresses(entries: Iterable[str]) -> frozenset[Address]:
    """Return every well-formed address in the entries. Each entry may be a comma list."""
    parts = (part for entry in entries for part in entry.split(",", MOST_ADDRESSES))
    found = (read_address(part.strip()) for part in itertools.islice(parts, MOST_ADDRESSES))
    return frozenset(address for address in found if address is not None)


def read_prescribed(text: str, endpoints: Sequence[Endpoint]) -> tuple[Address, ...]:
    """Return the addresses that a test prescribes, in the order of the header. An address without a port
    means every endpoint on that host. Only the first `_MOST_PRESCRIBED` count.
    """
    chosen: list[Address] = []
    for part in (p.strip() for p in text.split(",", _MOST_PRESCRIBED)[:_MOST_PRESCRIBED]):
        address = read_address(part)
        host = part.strip("[]")
        chosen += [address] if address else [e.address for e in endpoints if e.address.host == host]
    return tuple(dict.fromkeys(chosen))
