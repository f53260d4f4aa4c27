"""Defines the messages between pickers: batches of events, as msgpack.

Owns only the format. `dictionary` resolves names and chains, and `listener` knows what events mean. Every
batch is decoded against these types, and every number, name and list has a bound. So other bytes raise one
typed error, and nothing larger gets in. Every change here changes `FORMAT`, except a new last field with a
default. `FORMAT` is part of the name of the channel, so pickers with different formats never exchange
messages.

The number of a request is written as its distance from the newest request of the batch, and a time as its age
when the batch was made.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from epp.picker.server_caches import Roots

FORMAT: Final = 1
HASH_BYTES: Final = 8
_MOST_AGE_MS: Final = 2**31
MOST_NAMES: Final = 16_384
"""Most names that one picker may use before it starts a new dictionary."""
MOST_BYTES: Final = 2**50
"""Largest cache of one server."""
MOST_BATCH_BYTES: Final = 16 * 2**20
MOST_TABLE_BYTES: Final = 128 * 2**20
MOST_EVENTS: Final = 8_192
"""Most events in one batch. `speaker` and `storing` make far smaller batches."""
MOST_HANGING: Final = 256
"""Most hanging endpoints in one batch."""
MOST_FLOW_ROWS: Final = 512
"""Most rows of flow control in one batch."""
MOST_TOKENS: Final = 2**31
"""Most tokens of one request, or let go for one tenant since the last batch."""
_MOST_PORTIONS: Final = 65_536

_Age = Annotated[int, Meta(ge=0, le=_MOST_AGE_MS)]
_Number = Annotated[int, Meta(ge=0, le=2**62)]
_Index = Annotated[int, Meta(ge=0, le=MOST_NAMES)]
_Tokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
_Bytes = Annotated[int, Meta(ge=0, le=MOST_BYTES)]
_Name = Annotated[str, Meta(max_length=1_024)]


class BatchFlag(enum.IntFlag):
    FRESH = 1
    """A new dictionary begins with this batch, so the batch refers to no earlier one."""
    FORGET = 2
    """Forget all earlier requests of this picker: it will not report their ends."""
    JOINING = 4
    """This picker waits for the table of the other pickers."""
    STORED = 8
    """This picker has just stored its table."""


class Kept(enum.IntEnum):
    LOST = 0
    """The server did not compute the prompt."""
    ABORTED = 1
    """The server computed the prompt, and the request ended early. A picker of an older version also says so
    if it does not know whether the prompt was computed."""
    COMPUTED = 2
    DETACHED = 3
    """No picker follows the request to its end, so scrapes count it. If the server computes its prompt later,
    a `HeldChain` says so."""


class SharedBegan(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """A request was sent to an endpoint."""

    ago: _Number
    age_ms: _Age
    endpoint: _Index
    tokens: _Tokens
    adapter: _Index
    """0: none. Otherwise the index of its name plus 1."""
    head: bytes
    tail: bytes


class SharedMoved(SharedBegan, array_like=True, frozen=True, tag=2):
    """Another endpoint than the one in `SharedBegan` served the request."""


class SharedOver(msgspec.Struct, array_like=True, frozen=True, tag=3):
    ago: _Number
    age_ms: _Age
    kept: Annotated[int, Meta(ge=0, le=3)]
    failed: bool = False
    """Whether it failed by the server's own fault: a 5xx, a 429, or an answer that broke off. Pickers of an
    older version leave this out."""


class HeldChain(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """An endpoint holds this chain. No single request asked for it."""

    age_ms: _Age
    endpoint: _Index
    head: bytes
    tail: bytes


class Charged(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """Bytes in an endpoint's cache whose prompt is not known. In stored tables only."""

    endpoint: _Index
    size_bytes: _Bytes


class SharedRestarted(msgspec.Struct, array_like=True, frozen=True, tag=6):
    """An endpoint has lost its cache."""

    age_ms: _Age
    endpoint: _Index


class Sized(msgspec.Struct, array_like=True, frozen=True, tag=7):
    """Capacity of an endpoint's mirror, and its counter of prompt tokens then. In stored tables only."""

    endpoint: _Index
    capacity_bytes: _Bytes
    prompt_tokens: Annotated[float, Meta(ge=0, le=1e20)] | None


Event = SharedBegan | SharedMoved | SharedOver | HeldChain | Charged | SharedRestarted | Sized


FlowRow = tuple[
    _Name,
    Annotated[int, Meta(ge=-1000, le=1000)],
    Annotated[str, Meta(max_length=256)],
    bool,
    _Tokens,
    _Number,
    _Bytes,
    _Number,
]
"""Flow control at that picker: base model, priority, tenant, false (pickers of older versions demoted
requests), tokens let go since its last batch; requests, bytes and tokens that wait."""


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """Everything that one picker did since its last batch. Without events it is a sign of life."""

    speaker: Annotated[bytes, Meta(max_length=64)]
    """The random id of the sender, a new one after each start."""
    number: _Number
    """The sender's number of this batch, from 1 on."""
    hello: _Number
    """If this value changes, the sender has missed something, and all others must start new dictionaries."""
    flags: Annotated[int, Meta(ge=0, le=2**16)]
    newest: _Number
    """Number of the sender's newest request."""
    names: Annotated[list[tuple[_Name, int]], Meta(max_length=MOST_NAMES)]
    """New names of the sender's dictionary, each with a hash that identifies the process of that name."""
    events: Annotated[list[Event], Meta(max_length=MOST_EVENTS)]
    hanging: Annotated[list[_Index], Meta(max_length=MOST_HANGING)] = []
    """Endpoints that were found to hang since the last batch. Pickers of an older version leave this out."""
    flow: Annotated[list[FlowRow], Meta(max_length=MOST_FLOW_ROWS)] = []
    """Pickers of an older version leave this out."""
    cut: Annotated[list[_Index], Meta(max_length=MOST_HANGING)] = []
    """Endpoints that cut an answer midway, once for each. Pickers of an older version leave this out."""
    fatal: Annotated[
        list[tuple[_Number, Annotated[int, Meta(ge=1, le=16)]]], Meta(max_length=MOST_HANGING)
    ] = []
    """Requests that may have ended servers: the hash of the body, and the strikes against it. Pickers of an
    older version leave this out."""
    proved: Annotated[list[_Number], Meta(max_length=MOST_EVENTS)] | None = None
    """Requests of this batch or earlier ones whose prompts are computed, as distances from the newest
    request. None: a picker of an older version, which says so only by `SharedOver`."""

    made: Annotated[list[tuple[_Number, _Index]], Meta(max_length=MOST_EVENTS)] = []
    """What endpoints have made and keep: the hash of its id, and the endpoint. Pickers of an older version
    leave this out."""


class _StoredTable(msgspec.Struct, array_like=True, frozen=True):
    """A whole table: batches of Sized, HeldChain and Charged, for each endpoint from the least to the most
    recently used. Portions that were read are views of its bytes.
    """

    batches: Annotated[list[msgspec.Raw], Meta(max_length=_MOST_PORTIONS)]


class MalformedBatchError(ValueError):
    """The bytes are not a batch of this format."""


_encoder = msgspec.msgpack.Encoder()
_batch_decoder = msgspec.msgpack.Decoder(Batch)
_table_decoder = msgspec.msgpack.Decoder(_StoredTable)
_portion_decoder = msgspec.msgpack.Decoder(bytes)


def encode(message: Batch) -> bytes:
    return _encoder.encode(message)


def encode_table(portions: Sequence[bytes]) -> bytes:
    return _encoder.encode([portions])


def decode_batch(data: bytes | memoryview) -> Batch:
    if len(data) > MOST_BATCH_BYTES:
        raise MalformedBatchError(f"a batch of {len(data)} bytes is too long")
    try:
        return _batch_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBatchError(f"not a batch of format {FORMAT}: {error}") from error


def decode_table(data: bytes | memoryview) -> Iterator[bytes]:
    """Yield the portions of a stored table: batches, one copied at each step. MalformedError."""
    if len(data) > MOST_TABLE_BYTES:
        raise MalformedBatchError(f"a stored table of {len(data)} bytes is too long")
    try:
        for portion in _table_decoder.decode(data).batches:
            yield _portion_decoder.decode(portion)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBatchError(f"not a stored table of format {FORMAT}: {error}") from error


def age_ms(now: float, at: float) -> int:
    return min(_MOST_AGE_MS, max(0, round((now - at) * 1000)))


def pack_hashes(chain: Sequence[int]) -> bytes:
    """Return the hashes as bytes: eight bytes each, in this machine's order. The picker is only built for
    little-endian machines.
    """
    return (chain if isinstance(chain, array) else array("Q", chain)).tobytes()


def unpack_hashes(data: bytes) -> list[int]:
    if len(data) % HASH_BYTES:
        raise MalformedBatchError(f"{len(data)} bytes are not a list of hashes")
    hashes = array("Q")
    hashes.frombytes(data)
    return hashes.tolist()


def channel_of(pool: str, roots: Roots) -> str:
    """Return the name of the channel of pickers that may share: same pool, same hashes, same format.

    The name is in braces, so that a cluster keeps all keys of a channel on one node.
    """
    return f"prefix-gateway:{{{pool}:{FORMAT}:{roots.fingerprint}}}"
