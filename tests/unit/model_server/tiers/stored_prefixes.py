"""Prefixes whose KV follows from their hashes, so that a test can check what a store returns, and a writer
that a test can kill.

Run as a module, it opens the store in the given folder and writes until it is killed.
"""

import hashlib
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from model_server.core.hashing import BlockHash
from model_server.tiers.files import Disk
from model_server.tiers.layout import TokenOrder
from model_server.tiers.segment import KvLayout, LayerRecords, Segment
from model_server.tiers.store import PrefixStore
from tests.harness.engine_requests import block_hashes_of

LAYOUT = KvLayout(
    model="test", dtype="float32", num_layers=2, probe_bytes=3, rest_bytes=5, block_tokens=4, chunk_tokens=3
)
CAPACITY = 20_000


def chain(tokens: Sequence[int]) -> list[BlockHash]:
    return block_hashes_of(tokens, block_tokens=LAYOUT.block_tokens)


def records(hashes: Sequence[BlockHash]) -> list[LayerRecords]:
    """Make every token's record from the hash of its block, its place in the block, and the layer."""
    layers = []
    for layer in range(LAYOUT.num_layers):
        made = [
            hashlib.sha256(block + bytes((token, layer))).digest()
            for block in hashes
            for token in range(LAYOUT.block_tokens)
        ]
        layers.append(
            LayerRecords(
                b"".join(record[: LAYOUT.probe_bytes] for record in made),
                b"".join(record[-LAYOUT.rest_bytes :] for record in made),
            )
        )
    return layers


def check_segment(segment: Segment) -> None:
    segment.check_integrity()
    assert [segment.layer(layer) for layer in range(LAYOUT.num_layers)] == records(segment.place.hashes)


def random_order(rng: random.Random, num_tokens: int) -> TokenOrder:
    return TokenOrder.by_importance([rng.random() for _ in range(num_tokens)])


def random_prefix(rng: random.Random) -> list[BlockHash]:
    return chain(
        [rng.randrange(2) // (1 + at % 3) for at in range(LAYOUT.block_tokens * rng.randrange(1, 9))]
    )


def write_for_ever(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    store = PrefixStore(folder, LAYOUT, capacity_bytes=CAPACITY)
    while True:
        hashes = random_prefix(rng)
        store.put(hashes, records(hashes))
        own = rng.choice(store.segments())
        store.reorder(own, [random_order(rng, own.num_tokens) for _ in range(LAYOUT.num_layers)])
        print("written", flush=True)


def opened(folder: Path, *, capacity_bytes: int = CAPACITY, max_open_files: int | None = None) -> PrefixStore:
    disk = Disk(max_open_files=max_open_files)
    return PrefixStore(folder, LAYOUT, capacity_bytes=capacity_bytes, disk=disk)


def put(store: PrefixStore, hashes: list[BlockHash]) -> int:
    return store.put(hashes, records(hashes))


if __name__ == "__main__":
    write_for_ever(Path(sys.argv[1]), int(sys.argv[2]))
