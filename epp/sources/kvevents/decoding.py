"""Decodes KV events of vLLM, and computes its names for blocks of tokens. An event says that blocks were
stored, that blocks were removed, or that the server cleared its cache.

A message is a batch in msgpack: [time, [events], data parallel rank]. An event is a map with its name under
"type", or, from older releases, an array that starts with its name; fields were added at its end. Blocks are
named by 64-bit integers, or by whole hashes if the server is configured so. Unknown kinds of events are
ignored.

`medium` names the tier of a block: GPU, CPU or STORAGE. Without `medium` it is the first tier, and an unknown
medium counts as the last.

`BlockHasher` names the blocks of a prompt as the servers do. The hash of a full block is H((hash of the block
before, own tokens, extra keys)) over a serialized form of this tuple. Before the first block stands H(seed).
An adapter (its name, and the path that it was loaded from) is an extra key of each of its blocks. A cache
salt is an extra key of the first block. Events carry the low 64 bits of a hash. H is one of vLLM's four
functions (`--prefix-caching-hash-algo`): sha256 or xxh3-128, over pickle or over canonical CBOR. Pure.
"""

import hashlib
import pickle
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NewType, get_args

import xxhash
from msgspec import Meta, Raw, Struct, defstruct
from msgspec.msgpack import Decoder

BlockName = NewType("BlockName", int)
"""How an event names a block: the low 64 bits of its hash."""

Algorithm = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
ALGORITHMS: Final[tuple[Algorithm, ...]] = get_args(Algorithm)

DEFAULT_SEED: Final = "vllm-none-hash"
"""The servers' seed if PYTHONHASHSEED is not set. With the xxhash algorithms they then take a random seed."""

_Keys = tuple[tuple[str, ...], ...] | None


def block_name(hash_: bytes) -> BlockName:
    return BlockName(int.from_bytes(hash_[-8:], "big"))


class BlockHasher:
    """One algorithm and seed."""

    def __init__(self, algorithm: Algorithm, *, seed: str = "") -> None:
        self.algorithm: Algorithm = algorithm
        self._hash = _FORMULAS[algorithm]
        self._root = self._hash(seed or DEFAULT_SEED)

    def names(
        self,
        token_ids: Sequence[int],
        *,
        block_tokens: int,
        adapter: tuple[str, str] | None = None,
        cache_salt: str = "",
    ) -> list[BlockName]:
        """Return the names of a prompt's full blocks. adapter: the name of the adapter, and the path from
        which the servers loaded it.
        """
        parent, formula = self._root, self._hash
        every: list[tuple[str, ...]] = [("lora", *map(_own_object, adapter))] if adapter is not None else []
        later: _Keys = tuple(every) or None
        keys: _Keys = (*every, ("cache_salt", _own_object(cache_salt))) if cache_salt else later
        names = []
        for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
            parent = formula((parent, tuple(token_ids[start : start + block_tokens]), keys))
            names.append(block_name(parent))
            keys = later
        return names


def _own_object(text: str) -> str:
    """Return a separate object with the same text. Pickle writes an object that occurs twice as a
    reference, and in a server name, path and salt are three objects.
    """
    return text.encode().decode()


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _cbor(value: object) -> bytes:
    """Return canonical CBOR (RFC 8949) of the values that a block's hash covers."""
    match value:
        case int():
            return _head(0, value)
        case None:
            return b"\xf6"
        case bytes():
            return _head(2, len(value)) + value
        case str():
            text = value.encode()
            return _head(3, len(text)) + text
        case tuple():
            return _head(4, len(value)) + b"".join(map(_cbor, value))
    raise TypeError(f"cannot hash a value of type {type(value).__name__} for a block")


def _head(major: int, argument: int) -> bytes:
    if argument < 24:
        return bytes((major << 5 | argument,))
    power = ((argument.bit_length() + 7) // 8 - 1).bit_length()  # of the number of bytes: 1, 2, 4 or 8
    return ((major << 5 | 24 + power) << (8 << power) | argument).to_bytes(1 + (1 << power), "big")


_FORMULAS: Final[dict[Algorithm, Callable[[object], bytes]]] = {
    "sha256": lambda value: hashlib.sha256(_pickled(value)).digest(),
    "sha256_cbor": lambda value: hashlib.sha256(_cbor(value)).digest(),
    "xxhash": lambda value: xxhash.xxh3_128_digest(_pickled(value)),
    "xxhash_cbor": lambda value: xxhash.xxh3_128_digest(_cbor(value)),
}


_MOST_EVENTS: Final = 2**15
"""Most events of one message. A message of a megabyte has room for a million empty lists. Making them takes
350 ms, during which nothing else runs."""
_MOST_BLOCKS: Final = 2**17
_MOST_TOKENS: Final = 2**18
"""Most blocks and tokens of one event. A message of a megabyte has room for more only if numbers are tiny."""
TIERS: Final = 3
_TIER: Final = {None: 0, "GPU": 0, "CPU": 1}


@dataclass(frozen=True, slots=True)
class Stored:
    blocks: tuple[BlockName, ...]
    tier: int = 0
    plain_tokens: tuple[int, ...] = ()
    """The tokens of all these blocks together, if a prompt begins with them and the name of its first block
    covers nothing else: no adapter, media or salt."""
    group: int = 0
    partial_attention: bool = False
    """Whether the blocks belong to layers that look at only a part of the prompt. Such blocks say nothing
    about prefixes."""


@dataclass(frozen=True, slots=True)
class Removed:
    blocks: tuple[BlockName, ...]
    tier: int = 0
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """The server holds no blocks any more."""


KvEvent = Stored | Removed | Cleared


_BlockHash = int | bytes
_BlockHashes = Annotated[list[_BlockHash], Meta(max_length=_MOST_BLOCKS)]
_WHOLE_ATTENTION: Final = frozenset(
    {None, "full_attention", "mla_attention", "sink_full_attention", "unknown"}
)
_NO_KEYS: Final = (b"", b"\xc0", b"\x90")
"""The first bytes of an empty value, of nil and of an empty array."""


class _EventBatch(Struct, array_like=True):
    time: Raw
    events: Annotated[list[Raw], Meta(max_length=_MOST_EVENTS)]


class _EventType(Struct):
    type: str


class _BlockStored(Struct):
    """The fields in the order of the array form."""

    type: str
    block_hashes: _BlockHashes
    parent_block_hash: _BlockHash | None = None
    token_ids: Annotated[list[int], Meta(max_length=_MOST_TOKENS)] | None = None
    block_size: int | None = None
    lora_id: Raw = Raw()
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Annotated[list[Raw], Meta(max_length=_MOST_BLOCKS)] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _BlockRemoved(Struct):
    type: str
    block_hashes: _BlockHashes
    medium: str | None = None
    group_idx: int | None = None


def _decoders(kind: type[Struct]) -> tuple[Decoder[Any], Decoder[Any]]:
    """Return decoders for an array and for a map."""
    return Decoder(defstruct(f"{kind.__name__}Array", (), bases=(kind,), array_like=True)), Decoder(kind)


_BATCH: Final = Decoder(_EventBatch)
_HEAD: Final = _decoders(_EventType)
_STORED: Final = _decoders(_BlockStored)
_REMOVED: Final = _decoders(_BlockRemoved)


def decode(payload: bytes) -> list[KvEvent] | None:
    """Return the events of a message, in order. None: the bytes are not a batch of events."""
    try:
        events = [_event(raw) for raw in _BATCH.decode(payload).events]
    except Exception:  # noqa: BLE001 - bytes of a wrong kind, too long for memory, or nested too deeply
        return None
    return [event for event in events if event is not None]


def _event(raw: Raw) -> KvEvent | None:
    first = memoryview(raw)[0]
    is_map = first & 0xF0 == 0x80 or first in (0xDE, 0xDF)
    match _HEAD[is_map].decode(raw).type:
        case "BlockStored":
            return _stored(_STORED[is_map].decode(raw))
        case "BlockRemoved":
            removed = _REMOVED[is_map].decode(raw)
            return Removed(_names(removed.block_hashes), _tier(removed.medium), removed.group_idx or 0)
        case "AllBlocksCleared":
            return Cleared()
        case _:
            return None


def _stored(fields: _BlockStored) -> Stored:
    keys, tokens = fields.extra_keys, tuple(array("I", fields.token_ids or ()))  # refuses what is no token id
    more = fields.lora_name or (keys and bytes(memoryview(keys[0])[:1]) not in _NO_KEYS)
    return Stored(
        blocks=_names(fields.block_hashes),
        tier=_tier(fields.medium),
        plain_tokens=tokens if fields.parent_block_hash is None and not more else (),
        group=fields.group_idx or 0,
        partial_attention=fields.kv_cache_spec_kind not in _WHOLE_ATTENTION,
    )


def _names(values: list[_BlockHash]) -> tuple[BlockName, ...]:
    return tuple([BlockName(v & 0xFFFFFFFFFFFFFFFF) if isinstance(v, int) else block_name(v) for v in values])


def _tier(medium: str | None) -> int:
    return _TIER.get(medium and medium.upper(), TIERS - 1)
