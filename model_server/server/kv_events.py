"""KV events tell subscribers how the content of the prefix cache changes, in the form that vLLM 0.32 sends.

One message is a batch in msgpack: [timestamp, [events], data parallel rank]. Each event is a map with its
name under "type". vLLM defines the fields, their order, and the fields that are left out when they are empty.
Recorded messages that are decoded and encoded again give the same bytes (tests/contract).

`KvEventLog` takes notes while steps are planned and turns them into numbered messages afterwards. It keeps
the newest messages for subscribers that missed messages. Invariants (`check_integrity`): kept messages are
numbered without a gap, and the next message has the number after the newest kept message.

This module uses no socket and no clock. Callers: the driver, and `kv_publisher`, which sends the messages.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from model_server.core.hashing import BlockHash, PrefixScope, event_hash
from model_server.core.request import Request

MEDIUM = "GPU"
"""vLLM's name of the first tier, which it uses on a CPU too."""
SPEC_KIND = "full_attention"
DEFAULT_BUFFER_BATCHES = 10_000

ExtraKeys = tuple[str, ...]


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """Consecutive blocks of one sequence. `parent_block_hash` names the block before them, if any."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: tuple[ExtraKeys | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    block_hashes: tuple[int, ...]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    ts: float
    events: tuple[KvEvent, ...]
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """A batch as it is sent: its number, counted from 0, and its msgpack form."""

    sequence: int
    payload: bytes


_encode = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(KvEventBatch).decode
"""Return the batch of a payload that this server or vLLM wrote. Raise msgspec.MsgspecError for any other
payload.
"""


def encode_batch(batch: KvEventBatch) -> bytes:
    return _encode(batch)


class KvEventLog:
    """The cache's observer, and the messages made from its notes."""

    def __init__(self, *, block_size_tokens: int, buffer_batches: int = DEFAULT_BUFFER_BATCHES) -> None:
        if buffer_batches < 0:
            raise ValueError("the size of the replay buffer must not be negative")
        self._block_size_tokens = block_size_tokens
        self._notes: list[KvEvent] = []
        self._kept: deque[Message] = deque(maxlen=buffer_batches)
        self._next_sequence = 0
        self._adapter_ids: dict[tuple[str, str], int] = {}

    def stored(self, request: Request, *, first: int, end: int) -> None:
        size, scope = self._block_size_tokens, request.scope
        self._notes.append(
            BlockStored(
                block_hashes=tuple(map(event_hash, request.block_hashes[first:end])),
                parent_block_hash=event_hash(request.block_hashes[first - 1]) if first else None,
                token_ids=tuple(request.token_ids[first * size : end * size]),
                block_size=size,
                lora_id=self._adapter_id(scope),
                medium=MEDIUM,
                lora_name=scope.adapter_name or None,
                extra_keys=tuple(_extra_keys(scope, first=index == 0) for index in range(first, end)),
                group_idx=0,
                kv_cache_spec_kind=SPEC_KIND,
            )
        )

    def removed(self, block_hash: BlockHash) -> None:
        self._notes.append(BlockRemoved((event_hash(block_hash),), MEDIUM, 0))

    def cleared(self) -> None:
        """Note that no block can be found any more. Earlier notes that were not sent yet are dropped."""
        self._notes = [AllBlocksCleared()]

    def take(self, *, wall_time_s: float) -> Message | None:
        """Return the notes since the last call, as the next message. Return None if there are no notes."""
        if not self._notes:
            return None
        batch = KvEventBatch(wall_time_s, tuple(self._notes), 0)
        self._notes = []
        message = Message(self._next_sequence, encode_batch(batch))
        self._next_sequence += 1
        self._kept.append(message)
        return message

    def since(self, sequence: int) -> Sequence[Message]:
        """Return the kept messages from this number on, oldest first."""
        return [message for message in self._kept if message.sequence >= sequence]

    def check_integrity(self) -> None:
        assert all(after.sequence == before.sequence + 1 for before, after in pairwise(self._kept))
        assert not self._kept or self._kept[-1].sequence == self._next_sequence - 1
        ids = self._adapter_ids.values()
        assert sorted(ids) == list(range(1, len(ids) + 1))

    def _adapter_id(self, scope: PrefixScope) -> int | None:
        """Return a number for each adapter, from 1, in the order in which they first store a block.
        Another path is another adapter.
        """
        if not scope.adapter_name:
            return None
        key = (scope.adapter_name, scope.adapter_path)
        return self._adapter_ids.setdefault(key, len(self._adapter_ids) + 1)


def _extra_keys(scope: PrefixScope, *, first: bool) -> ExtraKeys | None:
    """Return the parts of a block's hash that are not tokens, without the tags that the hash itself
    covers.
    """
    keys = (scope.adapter_name,) if scope.adapter_name else ()
    if scope.cache_salt and first:
        keys = (*keys, scope.cache_salt)
    return keys or None
