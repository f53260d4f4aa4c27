"""KV events as vLLM sends them, decoded into the three things that they say.

A message is a batch in msgpack: [time, [events], data parallel rank]. An event is a map with its name under
"type", or, from older releases, an array that starts with its name. Blocks are named by 64-bit integers, or
by whole hashes if the server is configured so. Unknown kinds of events are ignored.

`medium` names the tier of a block: GPU, CPU or STORAGE. Without `medium` it is the first tier, and an unknown
medium counts as the slowest tier. Pure. Callers: `exact`, tests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import msgspec

from epp.kvevents.block_hashes import BlockName, block_name
from epp.prefix_index.kv_reports import Tier


@dataclass(frozen=True, slots=True)
class Stored:
    blocks: tuple[BlockName, ...]
    tier: Tier
    parent: BlockName | None = None
    token_ids: tuple[int, ...] = ()
    """The tokens of all these blocks together. Empty: the sender does not say."""
    block_tokens: int = 0
    adapter: str = ""
    extra: tuple[object, ...] | None = None
    """What the hash of the first block covers besides tokens: adapter's name, media, salt."""
    group: int = 0
    partial_attention: bool = False
    """Whether the blocks belong to layers that look at only a part of the prompt. Such blocks say nothing
    about prefixes."""


@dataclass(frozen=True, slots=True)
class Removed:
    blocks: tuple[BlockName, ...]
    tier: Tier
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """The server holds no blocks any more."""


Event = Stored | Removed | Cleared


class MalformedError(Exception):
    """The message is no batch of KV events."""


_STORED_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_REMOVED_FIELDS = ("block_hashes", "medium")
_WHOLE_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention", "unknown"})


def decode(payload: bytes) -> list[Event]:
    """The events of a message, in order. Raises MalformedError for any other bytes."""
    try:
        batch = msgspec.msgpack.decode(payload)
        events = [_event(item) for item in batch[1]]
    except Exception as error:
        # Bytes of a wrong kind, too long for memory or nested too deeply
        # are no events.
        raise MalformedError(f"not a batch of KV events: {error}") from error
    return [event for event in events if event is not None]


def _event(item: object) -> Event | None:
    if isinstance(item, dict):
        kind, fields = item.get("type"), item
    elif isinstance(item, list) and item:
        kind = item[0]
        names = _STORED_FIELDS if kind == "BlockStored" else _REMOVED_FIELDS
        fields = dict(zip(names, item[1:], strict=False))
    else:
        raise ValueError(f"an event is a map or an array, not {type(item).__name__}")
    match kind:
        case "BlockStored":
            return _stored(fields)
        case "BlockRemoved":
            return Removed(_names(fields["block_hashes"]), _tier(fields.get("medium")), _group(fields))
        case "AllBlocksCleared":
            return Cleared()
        case _:
            return None


def _stored(fields: Mapping[str, object]) -> Stored:
    parent, tokens = fields.get("parent_block_hash"), cast("Iterable[int]", fields.get("token_ids") or ())
    size, extra = fields.get("block_size"), fields.get("extra_keys")
    first = extra[0] if isinstance(extra, list) and extra else None
    return Stored(
        blocks=_names(fields["block_hashes"]),
        tier=_tier(fields.get("medium")),
        parent=None if parent is None else _name(parent),
        token_ids=tuple(array("I", tokens)),  # judges each of the events
        block_tokens=size if isinstance(size, int) else 0,
        adapter=str(fields.get("lora_name") or ""),
        extra=tuple(first) if isinstance(first, list) else None,
        group=_group(fields),
        partial_attention=fields.get("kv_cache_spec_kind") not in _WHOLE_ATTENTION,
    )


def _names(values: object) -> tuple[BlockName, ...]:
    if not isinstance(values, list):
        raise TypeError("block_hashes is no list")
    return tuple([_name(value) for value in values])


def _name(value: object) -> BlockName:
    if isinstance(value, int):
        return BlockName(value & 0xFFFFFFFFFFFFFFFF)
    if isinstance(value, bytes):
        return block_name(value)
    raise TypeError(f"a block is named by an integer or by bytes, not by {type(value).__name__}")


def _tier(medium: object) -> Tier:
    if medium is None:
        return Tier.GPU
    name = str(medium).upper()
    return Tier[name] if name in Tier.__members__ else Tier.STORAGE


def _group(fields: Mapping[str, object]) -> int:
    group = fields.get("group_idx")
    return group if isinstance(group, int) else 0
