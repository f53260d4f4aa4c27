"""Computes block hashes, which are the names by which blocks of tokens are found again.

A block's hash names the whole prefix up to the block's end. Two prompts share a block only if all tokens
before the block are equal too. So it is a chain: hash(hash of the block before, own tokens).

The LoRA adapter also decides the content of the KV cache, and the cache salt decides who may share it. Both
belong to the prompt's `PrefixScope`, which the hashes cover.

Algorithms:
- `sha256`, `sha256_cbor`: vLLM's two formulas bit for bit, so that KV events name the same blocks. A
  cryptographic hash keeps tenants apart: if collisions could be made on purpose, a tenant could write a
  prompt that reads another tenant's blocks in spite of the salt;
- `xxh3`: 128 bits, several times cheaper, for a server with a single tenant.

Callers: the KV cache managers.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NewType, get_args

import xxhash

BlockHash = NewType("BlockHash", bytes)
HashAlgorithm = Literal["sha256", "sha256_cbor", "xxh3"]
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


class BlockHasher(ABC):
    """Names blocks of up to `block_size_tokens` tokens. The first block of a prompt begins at position 0."""

    def __init__(self, block_size_tokens: int) -> None:
        if block_size_tokens < 1:
            raise ValueError(f"a block holds at least one token, not {block_size_tokens}")
        self.block_size_tokens = block_size_tokens

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

    @abstractmethod
    def name(
        self, chain: Sequence[BlockHash], token_ids: Sequence[int], *, end: int, scope: PrefixScope
    ) -> BlockHash:
        """Return the hash of the block after the blocks of `chain`. The block ends before position `end`, and
        may be partial.
        """


class ChainedHasher(BlockHasher):
    """vLLM's formula: H((hash before, own tokens, extra keys)) over a serialized form, beginning with
    H(seed).

    An adapter is an extra key of each of its blocks. A salt is an extra key of the first block only, since
    the hashes of later blocks depend on the first hash.
    """

    def __init__(self, block_size_tokens: int, *, formula: _Formula, seed: str) -> None:
        super().__init__(block_size_tokens)
        self._formula = formula
        self._root = BlockHash(formula(seed))

    def name(
        self, chain: Sequence[BlockHash], token_ids: Sequence[int], *, end: int, scope: PrefixScope
    ) -> BlockHash:
        own = tuple(token_ids[len(chain) * self.block_size_tokens : end])
        parent = chain[-1] if chain else self._root
        return BlockHash(self._formula((parent, own, _vllm_extra_keys(scope, first=not chain))))


class Xxh3Hasher(BlockHasher):
    """Chained xxh3, 128 bits, over the hash before and the own tokens as 32 bits each. The root covers the
    scope.
    """

    def __init__(self, block_size_tokens: int, *, seed: str) -> None:
        super().__init__(block_size_tokens)
        self._seed = seed.encode()

    def name(
        self, chain: Sequence[BlockHash], token_ids: Sequence[int], *, end: int, scope: PrefixScope
    ) -> BlockHash:
        own = token_ids[len(chain) * self.block_size_tokens : end]
        parent = chain[-1] if chain else xxhash.xxh3_128_digest(self._seed + scope.packed())
        return BlockHash(xxhash.xxh3_128_digest(parent + _packed(own)))


def make_hasher(algorithm: HashAlgorithm, *, block_size_tokens: int, seed: str = DEFAULT_SEED) -> BlockHasher:
    """Return the hasher for an algorithm. Raise ValueError if no algorithm has this name."""
    match algorithm:
        case "sha256":
            return ChainedHasher(block_size_tokens, formula=_sha256_pickle, seed=seed)
        case "sha256_cbor":
            return ChainedHasher(block_size_tokens, formula=_sha256_cbor, seed=seed)
        case "xxh3":
            return Xxh3Hasher(block_size_tokens, seed=seed)
        case _:  # The name comes from a command line or a file, so the type does not guarantee it.
            raise ValueError(
                f"unknown hash algorithm {algorithm!r}; choose one of {', '.join(HASH_ALGORITHMS)}"
            )


def event_hash(block_hash: BlockHash) -> int:
    """Return the name of the block in vLLM's KV events: the low 64 bits of its hash."""
    return int.from_bytes(block_hash[-8:], "big")


def _packed(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


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
