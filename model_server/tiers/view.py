"""A request's view of a stored prefix shows the request, layer by layer, the chosen tokens of the prefix and
all new tokens.

In each layer the first chunk of new tokens chooses by the probed keys. The chosen tokens are read once and
serve the request's later steps too. The source decides where the prefix comes from: paged memory, or the
tiers.

Callers: the paged model (`view_for`), the benchmarks.
"""

from typing import Protocol

import torch

from model_server.core.request import Request
from model_server.runners.hf.memory import KvMemory
from model_server.runners.hf.views import Context, LongChunk
from model_server.tiers.errors import StoreError
from model_server.tiers.selection import Choice, Chooser, Seen, visible_to


class PrefixSource(Protocol):
    """The keys and values of a prefix, one layer after the other."""

    @property
    def num_tokens(self) -> int: ...

    def probe_keys(self, layer: int) -> torch.Tensor:
        """Return the probed keys (tokens, first KV heads, dim), rotated as they are cached."""
        ...

    def chunks(self, layer: int) -> torch.Tensor | None:
        """Return the number of the chunk in which each token is read, with the shape (tokens,). None means
        that nothing is read in chunks.
        """
        ...

    def read(self, layer: int, tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values, each (tokens, KV head, dim), of these positions in ascending order.
        None means all positions.
        """
        ...


class UnreadableError(Exception):
    """A selective load failed in the middle of a step."""

    def __init__(self, request: Request, error: Exception) -> None:
        super().__init__(request.request_id)
        self.request = request
        self.error = error


class SelectiveView:
    """The `KvView` of one request whose first tokens are those of `source`."""

    def __init__(self, source: PrefixSource, choose: Chooser) -> None:
        self.choices: dict[int, Choice] = {}
        """The choice of each layer. All layers have chosen once the first chunk of new tokens is computed."""
        self.source = source
        self._choose = choose
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def read(
        self, layer: int, chunk: LongChunk, query: torch.Tensor, *, memory: KvMemory, scaling: float
    ) -> Context:
        num_prefix = self.source.num_tokens
        assert chunk.start >= num_prefix, "the prefix itself is not computed again"
        first_block, skipped = divmod(num_prefix, memory.block_size_tokens)
        new_keys, new_values = (
            read.flatten(0, 1)[skipped : chunk.end - num_prefix + skipped]
            for read in memory.read(layer, chunk.blocks[first_block:])
        )
        if layer not in self._kept:
            try:
                self._kept[layer] = self._select(layer, query, new_keys, scaling)
            except (StoreError, OSError) as error:
                raise UnreadableError(chunk.request, error) from error
        keys, values = self._kept[layer]
        before = keys.shape[0] + chunk.start - num_prefix
        return Context(
            torch.cat((keys, new_keys)),
            torch.cat((values, new_values)),
            visible_to(chunk.num_tokens, before, device=keys.device),
        )

    def _select(
        self, layer: int, query: torch.Tensor, new_keys: torch.Tensor, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose by the first chunk of new tokens. Between the prefix and this chunk there may be other
        tokens, which are already in the request's blocks.
        """
        probed = self.source.probe_keys(layer)
        seen = Seen(
            layer=layer,
            num_prefix_tokens=self.source.num_tokens,
            query=query,
            keys=torch.cat((probed, new_keys[:, : probed.shape[1]])),
            scaling=scaling,
            chunks=self.source.chunks(layer),
        )
        choice = self.choices[layer] = self._choose(seen)
        return self.source.read(layer, choice.tokens)
