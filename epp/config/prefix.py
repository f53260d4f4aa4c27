"""Defines the `chunks` and `table` parts of `epp.config.policy`: how prompts are cut into chunks,
and which chunks the picker remembers.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from epp.config.strict import Strict


class Chunks(Strict, frozen=True):
    """A prompt is cut into chunks before hashing. A change of their sizes empties the prefix table, because
    old hashes no longer match.
    """

    size_bytes: Annotated[int, Meta(ge=16, le=65536)] = 256
    """Size of a chunk at the start of a prompt, in bytes of UTF-8."""
    later_size_bytes: Annotated[int, Meta(ge=16, le=65536)] = 1024
    """Size of the later chunks of a prompt, in bytes of UTF-8. They may be larger, since precision matters
    less there."""
    later_from_bytes: Annotated[int, Meta(ge=0, le=2**30)] = 16384
    """Position in the prompt, in bytes, from which the larger chunks (`laterSizeBytes`) are used."""


class Table(Strict, frozen=True):
    """The prefix table: an approximate copy of what the prefix caches of the servers hold."""

    max_entries: Annotated[int, Meta(ge=1000, le=10**8)] = 1_000_000
    """Largest number of entries in the table. Each pair of a server and a chunk is one entry. An entry takes
    about 10 bytes of memory with long prompts, and 360 bytes with prompts of one chunk."""
    default_capacity_tokens: Annotated[int, Meta(ge=0, le=10**9)] = 200_000
    """Cache size in tokens that the picker assumes for a server whose metrics do not state it."""
    learn_capacity: bool = True
    """Learn the real cache sizes from the hit counters of the servers. Where the metrics state a size, the
    learned size differs from the stated one by at most a quarter."""
    ttl_seconds: Annotated[float, Meta(ge=1, le=10**7)] = 3600.0
    """An entry that was not used for this long is removed."""
    bytes_per_token: Annotated[float, Meta(gt=0.1, le=64)] = 4.0
    """Bytes of prompt text for each token, until the picker has learned this number. A change applies only to
    models that the picker has not seen yet."""
