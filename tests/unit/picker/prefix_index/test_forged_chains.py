"""A text that is made to have the chain of another text. With a known seed this takes milliseconds.

For each of eight lanes, XXH3 adds the words of a chunk and the products of their halves. Each half is
mixed with a key that comes from the seed. With the key, words can be chosen for any two sums.
"""

import random
import re
import secrets
import struct
from pathlib import Path
from typing import Final

from xxhash import xxh3_64_intdigest

from epp.config.policy import Chunks
from epp.picker.prefix_index import table
from epp.picker.server_caches import Roots, hash_chain

SOURCE = (Path(table.__file__).parent / "_chain.c").read_text()
KEYS = bytes.fromhex(
    "".join(re.findall(r"0x([0-9a-f]{2})", SOURCE.split("DEFAULT_SECRET[SECRET] =")[1]))[:384]
)
CHUNK: Final = 256
STRIPES: Final = (0, 8, 16, 121)
"""Where the keys of a chunk's four stripes of 64 bytes begin."""
ALL: Final = 2**64 - 1
HALF: Final = 2**32 - 1
SYSTEM = (b"You are a helpful assistant of the company. " * 400)[: 64 * CHUNK]


def forged_chunk(chunk: bytes, *, seed: int, rng: random.Random) -> bytes:
    """Return another chunk with the same hash."""
    keys = bytearray()
    for at in range(0, len(KEYS), 16):
        one, other = struct.unpack_from("<QQ", KEYS, at)
        keys += struct.pack("<QQ", one + seed & ALL, other - seed & ALL)
    made = bytearray(CHUNK)
    for lane in range(0, 64, 8):
        mixed = [int.from_bytes(keys[start + lane :][:8], "little") for start in STRIPES]
        words = [int.from_bytes(chunk[n * 64 + lane :][:8], "little") for n in range(4)]
        products = sum(((w ^ m) & HALF) * ((w ^ m) >> 32) for w, m in zip(words, mixed, strict=True)) & ALL
        high = rest = HALF + 1
        while high > HALF or rest > HALF:  # the first two words make the sum of products
            low = rng.randrange(min(products >> 32, HALF - 1) + 1, HALF + 1)
            high, rest = divmod(products, low)
        found = [(low | high << 32) ^ mixed[0], (1 | rest << 32) ^ mixed[1]]
        left = sum(words) - sum(found)  # the other two, whose products are 0, make the sum of words
        found.append((left - mixed[3] & HALF) | (mixed[2] & ~HALF))
        found.append(left - found[2] & ALL)
        for n, word in enumerate(found):
            struct.pack_into("<Q", made, n * 64 + lane, word)
    return bytes(made)


def forged_text(text: bytes, *, seed: int) -> bytes:
    made, rng = b"", random.Random(1)
    for start in range(0, len(text), CHUNK):
        chunk = text[start : start + CHUNK]
        made += forged_chunk(chunk, seed=seed, rng=rng)
        seed = xxh3_64_intdigest(chunk, seed)
    return made


def test_text_forged_for_a_known_seed_has_no_chunk_in_common_under_secret() -> None:
    schedule = Chunks()
    known = Roots(schedule).seed(model="m")
    forged = forged_text(SYSTEM, seed=known)
    chains = [hash_chain(text, seed=known, schedule=schedule) for text in (SYSTEM, forged)]
    assert chains[0] == chains[1], "the recipe works with a known seed"
    assert len(chains[0]) == 64
    assert forged != SYSTEM
    for _ in range(200):
        seed = Roots(schedule, secret=secrets.token_bytes(32)).seed(model="m")
        one, other = (hash_chain(text, seed=seed, schedule=schedule) for text in (SYSTEM, forged))
        assert not set(one) & set(other)
