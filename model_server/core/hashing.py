"""Chained block hashes: the name under which a full block of tokens is found again.

A block's hash covers the hash of the block before it, so one hash names the whole prefix up to the block's end, and two
prompts share a block only when everything before it is equal too. What else decides the content of the KV cache, the
LoRA adapter, and who may share it, the cache salt, goes into the first block's hash and so into the whole chain.

sha256 is used because the salt keeps tenants apart: with a hash that can be collided on purpose, one tenant could craft
a prompt that reads another's blocks. It costs about a microsecond for each block of 16 tokens.

Only full blocks have a hash. Callers: the KV cache manager.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

ROOT_HASH = BlockHash(hashlib.sha256(b"prefix-gateway model server, scheme 1").digest())
"""What stands for the missing predecessor of a first block."""


def extra_keys(*, adapter_name: str = "", adapter_path: str = "", cache_salt: str = "") -> bytes:
    """What a first block's hash covers beside its tokens; empty when the request has neither adapter nor salt.

    Each field is preceded by its length, so no two different triples give the same bytes.
    """
    if not adapter_name and not cache_salt:
        return b""
    fields = (adapter_name.encode(), adapter_path.encode(), cache_salt.encode())
    return b"".join(struct.pack("<I", len(field)) + field for field in fields)


class BlockHasher:
    """Extends chains of block hashes for one block size."""

    __slots__ = ("_layout", "block_size_tokens")

    def __init__(self, block_size_tokens: int) -> None:
        if block_size_tokens < 1:
            raise ValueError(f"a block holds at least one token, not {block_size_tokens}")
        self.block_size_tokens = block_size_tokens
        self._layout = struct.Struct(f"<{block_size_tokens}I")

    def extend(
        self, chain: list[BlockHash], token_ids: Sequence[int], *, num_blocks: int, extra: bytes
    ) -> None:
        """Append to `chain` until it covers the first `num_blocks` blocks of `token_ids`, all of them full."""
        size = self.block_size_tokens
        assert num_blocks * size <= len(token_ids), "only full blocks have a hash"
        parent = chain[-1] if chain else ROOT_HASH
        for index in range(len(chain), num_blocks):
            start = index * size
            content = parent + self._layout.pack(*token_ids[start : start + size])
            parent = BlockHash(hashlib.sha256(content if index else content + extra).digest())
            chain.append(parent)
