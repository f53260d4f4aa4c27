"""Computes vLLM's names for blocks of tokens from a prompt alone, in the same way as the servers compute
them.

The hash of a full block is H((hash of the block before, own tokens, extra keys)) over a serialized form of
this tuple. Before the first block stands H(seed). An adapter (its name, and the path that it was loaded from)
is an extra key of each of its blocks. A cache salt is an extra key of the first block. Events carry the low
64 bits of a hash. H is one of vLLM's four functions (`--prefix-caching-hash-algo`): sha256 or xxh3-128, over
pickle or over canonical CBOR.

Pure. Callers: `exact` (for a server's events), `mapping` (for prompts).
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Final, Literal, NewType, get_args

import xxhash

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
