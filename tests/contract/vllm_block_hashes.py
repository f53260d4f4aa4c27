"""vLLM's block hashes, computed from the rule alone:
what exact mode has to reproduce without asking a server.

hash(block) = H((hash of the block before, the block's tokens, extra keys or None)), with H = sha256 over the
pickled or the canonical CBOR form of that tuple. The first block's parent is H(seed). An adapter is an extra
key of each of its blocks, a cache salt of the first only. Events carry the low 64 bits of a hash.
"""

import hashlib
import pickle
from collections.abc import Sequence

Hashable = bytes | str | int | tuple["Hashable", ...] | None


def block_hashes(
    token_ids: Sequence[int],
    *,
    algorithm: str,
    seed: str,
    block_tokens: int,
    adapter: tuple[str, str] | None = None,
    cache_salt: str | None = None,
) -> list[bytes]:
    """Return the hash of each full block of `token_ids`; `adapter` is its name and the path from which it was
    loaded.
    """
    parent = _digest(seed, algorithm=algorithm)
    hashes: list[bytes] = []
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        keys: list[tuple[str, ...]] = [] if adapter is None else [("lora", *adapter)]
        if cache_salt is not None and start == 0:
            keys.append(("cache_salt", cache_salt))
        block = tuple(token_ids[start : start + block_tokens])
        parent = _digest((parent, block, tuple(keys) or None), algorithm=algorithm)
        hashes.append(parent)
    return hashes


def event_hash(block_hash: bytes) -> int:
    """Return the name of the block in a KV event."""
    return int.from_bytes(block_hash[-8:], "big")


def canonical_cbor(value: Hashable) -> bytes:
    """Encode by RFC 8949, section 4.2.1, for the types that a block hash covers."""
    match value:
        case None:
            return b"\xf6"
        case int():
            return _cbor_head(0, value)
        case bytes():
            return _cbor_head(2, len(value)) + value
        case str():
            encoded = value.encode()
            return _cbor_head(3, len(encoded)) + encoded
        case tuple():
            return _cbor_head(4, len(value)) + b"".join(map(canonical_cbor, value))


def _cbor_head(major: int, argument: int) -> bytes:
    """Return the type and the argument in the fewest bytes that hold the argument."""
    if argument < 24:
        return bytes([major << 5 | argument])
    size = next(size for size in (1, 2, 4, 8) if argument < 1 << 8 * size)
    return bytes([major << 5 | 23 + size.bit_length()]) + argument.to_bytes(size, "big")


def _digest(value: Hashable, *, algorithm: str) -> bytes:
    if algorithm == "sha256_cbor":
        return hashlib.sha256(canonical_cbor(value)).digest()
    assert algorithm == "sha256", algorithm
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()
