"""The part of a request's prefix that a store below the KV cache has. This module holds values only. The
tiers set the stored prefix on a request before the request is admitted. The KV cache manager reads which
blocks the prefix needs, and the runner copies or reads the content. Callers: the tiers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class LoadedPrefix:
    """Exact KV of the blocks [first_block, end_block), in memory and verified. The runner copies it into
    blocks.
    """

    first_block: int
    end_block: int
    size_bytes: int
    content: object


@dataclass(frozen=True, slots=True, eq=False)
class OutsidePrefix:
    """The runner reads the first `num_blocks` blocks from the store through its view, and copies nothing. The
    request's own blocks at these places stay empty, and cannot be found. All KV that is computed after such a
    prefix is approximate, so the request's scope names the approximation.
    """

    num_blocks: int
    view: object
