"""The settings of selective loads and of a server's store. They are plain values, checked once. Callers: all
code that selects tokens, the hash key of approximate results, and the server's flags.
"""

from dataclasses import dataclass
from pathlib import Path

from model_server.tiers.placement import ScoreName
from model_server.tiers.similarity import DEFAULT_ALPHA

PROBE_HEADS = 3
FEW_CHUNKS = 0.98
EVERY_CHUNK = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionSettings:
    ratio: float = 0.5
    """The share of a prefix's tokens that attention gets, in layers whose heads agree."""
    probe_heads: int = PROBE_HEADS
    alpha: float = DEFAULT_ALPHA
    chunk_share: float = FEW_CHUNKS
    """The share of the chosen tokens' weight that the chunks to be read must hold. Under 1, the chunks that
    hold the least weight are left out, and their tokens are replaced by the best other tokens of chunks that
    are read. At 1, a chunk is read even for one chosen token.
    """

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be over 0 and at most 1, not {self.ratio}")
        if self.probe_heads < 1:
            raise ValueError(f"probe_heads must be at least 1, not {self.probe_heads}")
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha must be over 0 and at most 1, not {self.alpha}")
        if not 0 < self.chunk_share <= 1:
            raise ValueError(f"chunk_share must be over 0 and at most 1, not {self.chunk_share}")

    @property
    def cache_key(self) -> str:
        """Return the part of a block's hash that names these settings. Blocks that were computed after a
        selective load are not exact, so their hashes must differ from those of exact blocks and of other
        settings.
        """
        few_chunks = f":{self.chunk_share:g}" if self.chunk_share < EVERY_CHUNK else ""
        heads = f":heads={self.probe_heads}" if self.probe_heads != PROBE_HEADS else ""
        alpha = f":alpha={self.alpha:g}" if self.alpha != DEFAULT_ALPHA else ""
        return f"sel:{self.ratio:g}{few_chunks}{heads}{alpha}"

    def kept(self, num_tokens: int) -> int:
        return max(1, round(self.ratio * num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStoreSettings(SelectionSettings):
    """The settings of a server's store of prefixes, beyond the blocks of its engine. Those of a selection
    count only for a ratio under 1.
    """

    folder: Path
    size_bytes: int = 20_000_000_000
    """The most bytes in the folder."""
    cpu_bytes: int = 1_000_000_000
    """Main memory for chunks that were read."""
    device_bytes: int = 0
    """Memory of the model's device for chunks that were read, beside the engine's blocks."""
    ratio: float = 1.0
    """At 1, stored prefixes are loaded whole, and answers are exact. Below 1, only this share of their tokens
    is read.
    """
    score: ScoreName = "uses"
    """Decides which chunks the fast tiers keep (`placement`)."""
    chunk_tokens: int = 16
    pending_bytes: int = 512_000_000
    """The most bytes that may wait to be written. Further prefixes are not stored."""
    staged_bytes: int = 1_000_000_000
    """The most bytes that may be loaded ahead for requests that wait for their admission."""

    def __post_init__(self) -> None:
        SelectionSettings.__post_init__(self)  # `super` does not find the class that slots replace
        if self.size_bytes < 1:
            raise ValueError("the size of a KV store must be over 0")
        if min(self.cpu_bytes, self.device_bytes, self.pending_bytes, self.staged_bytes) < 0:
            raise ValueError("no size of a KV store may be negative")
        if self.chunk_tokens < 1:
            raise ValueError(f"a chunk holds at least one token, not {self.chunk_tokens}")
        if self.device_bytes and self.ratio == 1:
            raise ValueError(
                "--kv-store-device-size holds prefixes that are read selectively: give --kv-store-ratio under 1, or a device size of 0"
            )

    @property
    def selection(self) -> SelectionSettings | None:
        """Return the settings of selective loads. None means that every prefix is loaded whole."""
        return None if self.ratio == 1 else self
