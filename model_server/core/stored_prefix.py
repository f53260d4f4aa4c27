"""What a store below the KV cache has of one request's prefix. Values; the content is the runner's business.

Set on a request before it is admitted, read by the KV cache manager (which blocks it needs for it) and by the
runner (which copies or reads the content). Callers: the tiers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class LoadedPrefix:
    """Exact KV of blocks [first_block, end_block), in memory and checked:
    the runner copies it into blocks.
    """

    first_block: int
    end_block: int
    size_bytes: int
    content: object


@dataclass(frozen=True, slots=True, eq=False)
class OutsidePrefix:
    """The first `num_blocks` blocks are read where they are, as the runner's view of them likes.

    The request's own blocks at these places stay empty, and nobody can find them.
    What is computed after such a prefix is approximate, so the request's scope says so.
    """

    num_blocks: int
    view: object
