"""Computes block hashes, which are the names by which blocks of tokens are found again.

A block's hash names the whole prefix up to the block's end. Two prompts share a block only if all tokens
before the block are equal too. So it is a chain: hash(hash of the block before, own tokens).

The LoRA adapter also decides the content of the KV cache, and the cache salt decides who may share it. Both
belong to the prompt's `PrefixScope`, which the hashes cover.

`sha256` and `sha256_cbor` are vLLM's two formulas bit for bit, so that KV events name the same blocks. A
cryptographic hash keeps tenants apart: if collisions could be made on purpose, a tenant could write a prompt
that reads another tenant's blocks in spite of the salt.

Callers: the KV cache managers.
"""

import hashlib
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NewType, get_args

BlockHash = NewType("BlockHash", bytes)
HashAlgorithm = Literal["sha256", "sha256_cbor"]
HASH_ALGORITHMS: tuple[HashAlgorithm, ...] = get_args(HashAlgorithm)

DEFAULT_SEED = "vllm-none-hash"
"""The text from which vLLM derives the root hash if PYTHONHASHSEED is not set."""

_ExtraKeys = tuple[tuple[str, ...], ...] | None
_Formula = Callable[[object], bytes]


@dataclass(frozen=True, slots=True)
class PrefixScope:
    """The values that a prefix's hashes cover besides its tokens."""

    adapter_name: str = ""
    adapter_path: str = ""
    cache_salt: str = ""
    approximation: str = ""
    """The name of the way in which the prefix's KV differs from the KV that the model computes from the
    tokens alone (`sel:0.25`). Empty means that the KV does not differ.
    """

    def packed(self) -> bytes:
        """Return the scope as bytes, which are empty for the plain scope. A length stands before each
        field, so different scopes give different bytes.
        """
        fields = [self.adapter_name.encode(), self.adapter_path.encode(), self.cache_salt.encode()]
        if self.approximation:
            fields.append(self.approximation.encode())
        elif not self.adapter_name and not self.cache_salt:
            return b""
        return b"".join(struct.pack("<I", len(field)) + field for field in fields)


class BlockHasher:
    """Names blocks of up to `block_size_tokens` tokens. The first block of a prompt begins at position 0.

    The formula is vLLM's: H((hash before, own tokens, extra keys)) over a serialized form, beginning with
    H(seed). An adapter is an extra key of each of its blocks. A salt is an extra key of the first block only,
    since the hashes of later blocks depend on the first hash.
    """

    def __init__(self, algorithm: HashAlgorithm, *, block_size_tokens: int, seed: str = DEFAULT_SEED) -> None:
        if block_size_tokens < 1:
            raise ValueError(f"a block holds at least one token, not {block_size_tokens}")
        self.block_size_tokens = block_size_tokens
        self._formula: _Formula = _sha256_cbor if algorithm == "sha256_cbor" else _sha256_pickle
        self._root = BlockHash(self._formula(seed))

    def extend(
        self, chain: list[BlockHash], token_ids: Sequence[int], *, num_blocks: int, scope: PrefixScope
    ) -> None:
        """Append to `chain` until it covers the first `num_blocks` blocks of `token_ids`,
        which must be full.
        """
        size = self.block_size_tokens
        assert num_blocks * size <= len(token_ids), "a full block has all its tokens"
        for index in range(len(chain), num_blocks):
            chain.append(self.name(chain, token_ids, end=(index + 1) * size, scope=scope))

    def name(
        self, chain: Sequence[BlockHash], token_ids: Sequence[int], *, end: int, scope: PrefixScope
    ) -> BlockHash:
        """Return the hash of the block after the blocks of `chain`. The block ends before position `end`, and
        may be partial.
        """
        own = tuple(token_ids[len(chain) * self.block_size_tokens : end])
        parent = chain[-1] if chain else self._root
        return BlockHash(self._formula((parent, own, _vllm_extra_keys(scope, first=not chain))))


def event_hash(block_hash: BlockHash) -> int:
    """Return the name of the block in vLLM's KV events: the low 64 bits of its hash."""
    return int.from_bytes(block_hash[-8:], "big")


def _vllm_extra_keys(scope: PrefixScope, *, first: bool) -> _ExtraKeys:
    """Return the parts of the hash that are not tokens. The pickled form depends on which strings are one
    object, so name, path and salt are made as separate objects. In vLLM they come from different fields of
    parsed JSON: equal text, different objects.
    """
    keys: list[tuple[str, ...]] = []
    if scope.adapter_name:
        keys.append(("lora", _own_object(scope.adapter_name), _own_object(scope.adapter_path)))
    if scope.cache_salt and first:
        keys.append(("cache_salt", _own_object(scope.cache_salt)))
    if scope.approximation and first:
        keys.append(("approximation", _own_object(scope.approximation)))
    return tuple(keys) or None


def _own_object(text: str) -> str:
    return text.encode().decode()


def _sha256_pickle(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


def _sha256_cbor(value: object) -> bytes:
    return hashlib.sha256(_cbor(value)).digest()


def _cbor(value: object) -> bytes:
    """Encode in canonical CBOR (RFC 8949), for the types that a block hash covers."""
    match value:
        case None:
            return b"\xf6"
        case int():
            return _cbor_head(0, value)
        case bytes():
            return _cbor_head(2, len(value)) + value
        case str():
            text = value.encode()
            return _cbor_head(3, len(text)) + text
        case tuple():
            return _cbor_head(4, len(value)) + b"".join([_cbor(item) for item in value])
        case _:
            raise TypeError(f"a block hash covers no {type(value).__name__}")


def _cbor_head(major: int, argument: int) -> bytes:
    if argument < 24:
        return bytes((major << 5 | argument,))
    if argument < 1 << 8:
        return struct.pack(">BB", major << 5 | 24, argument)
    if argument < 1 << 16:
        return struct.pack(">BH", major << 5 | 25, argument)
    if argument < 1 << 32:
        return struct.pack(">BI", major << 5 | 26, argument)
    return struct.pack(">BQ", major << 5 | 27, argument)
