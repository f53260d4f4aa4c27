"""Paged attention, as a function that transformers' models call by its name in every layer.

First the step's keys and values go to their slots. Then the queries of each request attend to the content of
the request's blocks. This module keeps nothing about a request between steps. Requests with one token each
are attended together; the query heads that share a KV head then take the place of query positions, so that no
key is repeated for them.

Models whose attention needs more than a causal mask (sliding windows, soft caps, sinks) are refused, because
a wrong answer would look like a right one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from model_server.runners.hf.batch import SingleTokens, StepBatch
from model_server.runners.hf.errors import UnsupportedModelError
from model_server.runners.hf.memory import KvMemory
from model_server.runners.hf.views import Context, LongChunk

NAME = "prefix_gateway_paged"
_BEYOND_CAUSAL = ("sliding_window", "softcap", "s_aux")


def register() -> None:
    """Make `NAME` known to transformers. A second call has no further effect. torch may not take cuDNN's
    attention, which on Hopper takes tens of milliseconds to plan each new length, so nearly every step.
    """
    AttentionInterface.register(NAME, paged_attention)
    torch.backends.cuda.enable_cudnn_sdp(False)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    *,
    scaling: float,
    paged: PagedStep,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Compute one layer's attention over the current step. `query` is (1, head, rows, dim), `key` and `value`
    are (1, KV head, rows, dim). Return (1, rows, head, dim).
    """
    assert attention_mask is None, "paged attention makes its own masks"
    for name in _BEYOND_CAUSAL:
        if options.get(name) is not None:
            raise UnsupportedModelError(
                f"the model's attention uses {name}, but this engine computes only plain causal attention"
            )
    rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return paged.attend(int(module.layer_idx), *rows, scaling=scaling)[None], None


class PagedStep:
    """The attention of one step over one memory."""

    def __init__(self, batch: StepBatch, memory: KvMemory) -> None:
        self._batch = batch
        self._memory = memory
        self._causal: dict[int, torch.Tensor] = {}
        read = [one.blocks for one in batch.singles]
        read += [chunk.blocks for chunk in batch.longs if chunk.view is None]
        self._scratch = memory.scratch(max((blocks.numel() for blocks in read), default=0))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float
    ) -> torch.Tensor:
        """Attend in one layer. All arguments have the shape (rows, head, dim). Return the shape of
        `query`.
        """
        self._memory.write(layer, self._batch.slots, key, value)
        out = torch.empty_like(query)
        if (packed := self._batch.packed) is not None:
            out[packed.rows] = packed.attend(layer, query[packed.rows], memory=self._memory, scaling=scaling)
        for singles in self._batch.singles:
            out[singles.rows] = self._attend_singles(layer, query[singles.rows], singles, scaling)
        for chunk in self._batch.longs:
            rows = slice(chunk.first_row, chunk.end_row)
            out[rows] = self._attend_long(layer, query[rows], chunk, scaling)
        return out

    def _attend_singles(
        self, layer: int, query: torch.Tensor, singles: SingleTokens, scaling: float
    ) -> torch.Tensor:
        reads = self._memory.read(layer, singles.blocks, into=self._scratch)
        keys, values = (read.flatten(1, 2)[:, : singles.end] for read in reads)
        requests, heads, dim = query.shape
        attended = scaled_dot_product_attention(
            query.reshape(requests, keys.shape[2], -1, dim),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=None if singles.mask is None else singles.mask[:, None, None, :],
            scale=scaling,
        )
        return attended.reshape(requests, heads, dim)

    def _attend_long(self, layer: int, query: torch.Tensor, chunk: LongChunk, scaling: float) -> torch.Tensor:
        if chunk.view is None:
            reads = self._memory.read(layer, chunk.blocks, into=self._scratch)
            keys, values = (read.flatten(0, 1)[: chunk.end] for read in reads)
            context = Context(keys, values, None)
        else:
            context = chunk.view.read(layer, chunk, query, memory=self._memory, scaling=scaling)
        groups = query.shape[1] // context.keys.shape[1]
        whole = context.visible is None and chunk.start == 0
        attended = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            context.keys.transpose(0, 1).repeat_interleave(groups, dim=0)[None],
            context.values.transpose(0, 1).repeat_interleave(groups, dim=0)[None],
            attn_mask=None if whole else self._mask(chunk, context),
            is_causal=whole,
            scale=scaling,
        )
        return attended[0].transpose(0, 1)

    def _mask(self, chunk: LongChunk, context: Context) -> torch.Tensor:
        """Return a mask of shape (queries, tokens). A causal mask is made once for all layers. The mask holds
        numbers to add to scores. torch would otherwise turn a mask of true and false into such numbers in
        each layer.
        """
        if context.visible is not None:
            return context.visible
        mask = self._causal.get(chunk.first_row)
        if mask is None:
            beyond = self._memory.data.new_full((chunk.num_tokens, chunk.end), -math.inf)
            mask = self._causal[chunk.first_row] = beyond.triu(diagonal=chunk.start + 1)
        return mask
