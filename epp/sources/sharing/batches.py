"""Defines the messages between pickers (batches of events, as msgpack), and the links that carry them.

Owns only the format. `listener` knows what events mean. A batch refers to no other batch. Every batch is
decoded against these types, and every number, name and list has a bound. So other bytes raise one typed
error, and nothing larger gets in. Every change here changes `FORMAT`, except a new last field with a default.
`FORMAT` is part of the name of the channel, so pickers with different formats never exchange messages.

Times are milliseconds of the sender's own clock. A batch has the time when it was made, so the difference
shows how old an event is.
"""

import enum
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Protocol

import msgspec
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from epp.picker.endpoints.endpoint_state import EndpointState

FORMAT: Final = 3
MOST_CHUNKS: Final = 16_384
"""Most chunks of one chain: 16 MB of prompt by the default policy. Further chunks are left out, so that no
event costs more than some milliseconds."""
MOST_BATCH_BYTES: Final = 2 * 2**20
MOST_EVENTS: Final = 8_192
"""Most events in one batch. `exchange` makes far smaller batches."""
MOST_TOKENS: Final = 2**31
"""Most tokens of one request."""

_Number = Annotated[int, Meta(ge=0, le=2**62)]
_PromptTokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
Name = Annotated[str, Meta(max_length=1_024)]
Process = Annotated[int, Meta(ge=0, le=2**32 - 1)]
"""A hash that identifies the process of an endpoint: see `identity_of`."""


Trouble = Literal["restarted", "hangs", "cut"]


class Kept(enum.IntEnum):
    LOST = 0
    """The request ended before its answer did, or the server did not compute the prompt."""
    COMPUTED = 1
    DETACHED = 2
    """No picker follows the request to its end, so scrapes count it. If the server computes its prompt later,
    a `HeldChain` says so."""


class _Happened(msgspec.Struct, array_like=True, frozen=True):
    at_ms: _Number


class _SharedOfServer(_Happened, frozen=True):
    server: Name
    process: Process


class SharedBegan(_SharedOfServer, frozen=True, tag=1):
    """A request was sent to an endpoint. A second one with the same number: another served it."""

    number: _Number
    tokens: _PromptTokens
    adapter: Name
    """Empty: none."""
    chain: bytes


class SharedProved(_Happened, frozen=True, tag=2):
    """The prompt of a request is computed."""

    number: _Number


class SharedOver(_Happened, frozen=True, tag=3):
    number: _Number
    kept: Annotated[int, Meta(ge=0, le=2)]
    failed: bool
    """Whether it failed by the server's own fault: a 5xx, a 429, or an answer that broke off."""
    no_token: bool = False
    """Whether the answer was an error, or ended so soon that it may hold no token."""


class HeldChain(_SharedOfServer, frozen=True, tag=4):
    """An endpoint holds this chain and this adapter, and the request that asked for them is over."""

    chain: bytes
    adapter: Name = ""


class SharedTrouble(_SharedOfServer, frozen=True, tag=5):
    """An endpoint has lost its cache, its requests hang, or it cut an answer midway."""

    what: Trouble


class SharedFatal(_Happened, frozen=True, tag=6):
    """A request may have ended servers."""

    body_hash: Annotated[int, Meta(ge=1, le=2**62)]  # 0 stands for every request without a body
    strikes: Annotated[int, Meta(ge=1, le=16)]


class SharedMade(_SharedOfServer, frozen=True, tag=7):
    """An endpoint has made something that it keeps."""

    id_hash: _Number


ServerEvent = SharedBegan | HeldChain | SharedTrouble | SharedMade
SharedEvent = ServerEvent | SharedProved | SharedOver | SharedFatal


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """Everything that one picker did since its last batch. Without events it is a sign of life."""

    speaker: Annotated[bytes, Meta(max_length=64)]
    """The random id of the sender, a new one after each start."""
    number: _Number
    """The sender's number of this batch. If it left out events, it leaves out a number too."""
    at_ms: _Number
    events: Annotated[list[SharedEvent], Meta(max_length=MOST_EVENTS)]


class MalformedBatchError(ValueError):
    """The bytes are not a batch of this format."""


class LinkError(Exception):
    """The link cannot do this now. `reason` is a short label for metrics."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Received:
    """A batch, and how long ago it was given to the link, by the link's clock."""

    data: bytes | memoryview
    age_s: float


class Link(Protocol):
    """Carries batches between pickers: over Redis (`redis_link`) or a local socket (`hub`).

    A link may be slow, away or full at any time. Each call ends within a few seconds, with its result or with
    a LinkError, and the next call tries again. Batches of one picker arrive in order. The numbers of the
    batches show whether any were lost.
    """

    async def agree(self, pool: str, mine: bytes) -> bytes:
        """Return the value that all pickers of a pool have in common: `mine`, unless another picker was
        first.
        """

    async def join(self, channel: str) -> None:
        """Join this channel. `read` returns all batches that the link still keeps, the oldest first."""

    async def send(self, batch: bytes) -> None:
        """Send to all pickers of the channel."""

    async def read(self) -> list[Received]:
        """Return the batches since the last call, oldest first, perhaps our own too. Waits about a
        second.
        """

    async def close(self) -> None: ...


encode: Final = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Batch)


def decode_batch(data: bytes | memoryview) -> Batch:
    if len(data) > MOST_BATCH_BYTES:
        raise MalformedBatchError(f"a batch of {len(data)} bytes is too long")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBatchError(f"not a batch of format {FORMAT}: {error}") from error


def milliseconds(at: float) -> int:
    return max(0, round(at * 1000))


def identity_of(state: EndpointState) -> int:
    """Return a hash of 32 bits that identifies the process of an endpoint, as far as the source shows. It is
    the same on all pickers.
    """
    endpoint = state.endpoint
    named = f"{endpoint.incarnation}\0{endpoint.model}".encode("utf-8", "surrogatepass")
    return xxh3_64_intdigest(named) >> 32
