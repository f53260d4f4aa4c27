"""A hook that decides which keys and values a request reads instead of those of all its blocks. A store that
reads only important tokens uses this hook.

A view stands between one request's queries and its keys and values, in each layer. The view is called after
the step's own keys and values are written. It gets the queries, so it can compute attention weights itself.
Without a view each query reads every token up to its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from model_server.core.request import Request
from model_server.runners.hf.memory import KvMemory


@dataclass(frozen=True, slots=True, eq=False)
class LongChunk:
    """Several tokens of one request, or any chunk with a view: rows [first_row, end_row) of the step."""

    request: Request
    first_row: int
    end_row: int
    start: int
    """The position of the chunk's first token in its request."""
    blocks: torch.Tensor
    """The numbers of the request's blocks up to the chunk's last token."""
    view: KvView | None

    @property
    def num_tokens(self) -> int:
        return self.end_row - self.first_row

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """The keys and values that one chunk attends to in one layer."""

    keys: torch.Tensor
    """The shape is (tokens, KV head, dim)."""
    values: torch.Tensor
    visible: torch.Tensor | None
    """True where a query may look. The shape is (queries, tokens). None means that token i is position i, and
    each query sees the tokens up to itself.
    """


class KvView(Protocol):
    def read(
        self, layer: int, chunk: LongChunk, query: torch.Tensor, *, memory: KvMemory, scaling: float
    ) -> Context:
        """Return the keys and values that the request reads. `query` is (queries, head, dim), after rotation
        and not yet multiplied by `scaling`.
        """
        ...


ViewFor = Callable[[Request], KvView | None]


def no_view(_: Request) -> None:
    """Return no view, so that every request reads all of its blocks."""


def attention_weights(
    query: torch.Tensor, keys: torch.Tensor, *, scaling: float, visible: torch.Tensor | None = None
) -> torch.Tensor:
    """Return softmax weights as in the model's attention: (head, query, token), in float32. `query` is
    (queries, head, dim) and `keys` is (tokens, KV head, dim). Each KV head serves an equal number of
    consecutive query heads.
    """
    groups = query.shape[1] // keys.shape[1]
    repeated = keys.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), repeated.float()) * scaling
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores.softmax(-1)
