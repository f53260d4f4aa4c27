from collections.abc import Sequence

from epp.base.types import ChunkHash

def chain_of(
    prompt: bytes | memoryview, seed: int, size: int, count: int, later_size: int, later_count: int, /
) -> list[int]: ...
def sampled(chunks: Sequence[ChunkHash], mask: int, /) -> list[ChunkHash]: ...
