"""Turns one step's chunks into tensors: the tokens of all requests in one row, and for each request its part
of the row.

A request that computes one token is attended together with others of about its length. The attention of a
longer chunk is computed separately, and so is that of a request with a long context on a CPU. A batch is
built once for each step, and every layer reads it. Callers: the model (builds), the attention function
(reads).
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from model_server.core.scheduler import Chunk
from model_server.runners.hf import packed
from model_server.runners.hf.memory import KvMemory
from model_server.runners.hf.packed import PackedTokens
from model_server.runners.hf.views import LongChunk, ViewFor

_LONG_TOKENS = 256
"""On a CPU, contexts from this length on are copied and attended one at a time, so that the copy of one
context is still in the processor's caches when it is read. Shorter contexts are attended together, which
costs fewer calls.
"""


@dataclass(frozen=True, slots=True, eq=False)
class SingleTokens:
    """Requests with one token each, whose contexts differ by at most the factor two."""

    rows: torch.Tensor
    """The row in the step of each request's token. The shape is (requests,)."""
    blocks: torch.Tensor
    """Block numbers, padded with any block. The shape is (requests, blocks)."""
    end: int
    """The length of the longest context of these requests, in tokens."""
    mask: torch.Tensor | None
    """Numbers that are added to scores, 0 where the request has a token. The shape is (requests, end). None
    means that every context has this length.
    """


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    token_ids: torch.Tensor
    """The shape is (1, rows)."""
    positions: torch.Tensor
    """The shape is (1, rows)."""
    slots: torch.Tensor
    """The slot for the keys and values of each token. The shape is (rows,)."""
    last_rows: torch.Tensor
    """The row of each chunk's last token, in the plan's order. The shape is (chunks,)."""
    singles: tuple[SingleTokens, ...]
    longs: tuple[LongChunk, ...]
    packed: PackedTokens | None
    """On a GPU, all requests without a view."""


def make_batch(chunks: Sequence[Chunk], *, memory: KvMemory, view_for: ViewFor) -> StepBatch:
    """Return one step's chunks as tensors."""
    block_size_tokens, device, dtype = memory.block_size_tokens, memory.device, memory.shape.dtype
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last_rows: list[int] = []
    longs: list[LongChunk] = []
    together: list[tuple[range, list[int], int]] = []
    singles: defaultdict[int, list[tuple[int, list[int], int]]] = defaultdict(list)
    for chunk in chunks:
        first_row, end = len(token_ids), chunk.start + chunk.num_tokens
        blocks = [int(block.block_id) for block in chunk.table[: -(-end // block_size_tokens)]]
        token_ids += chunk.request.token_ids[chunk.start : end]
        positions += range(chunk.start, end)
        slots += [
            blocks[position // block_size_tokens] * block_size_tokens + position % block_size_tokens
            for position in range(chunk.start, end)
        ]
        last_rows.append(len(token_ids) - 1)
        view = view_for(chunk.request)
        if view is None and packed.possible(memory):
            together.append((range(first_row, len(token_ids)), blocks, end))
        elif chunk.num_tokens == 1 and view is None:
            alone = end >= _LONG_TOKENS and device.type == "cpu"
            group = -1 - first_row if alone else len(blocks).bit_length()
            singles[group].append((first_row, blocks, end))
        else:
            numbers = torch.tensor(blocks, device=device)
            longs.append(LongChunk(chunk.request, first_row, len(token_ids), chunk.start, numbers, view))
    return StepBatch(
        token_ids=torch.tensor([token_ids], device=device),
        positions=torch.tensor([positions], device=device),
        slots=torch.tensor(slots, device=device),
        last_rows=torch.tensor(last_rows, device=device),
        singles=tuple(_together(group, device, dtype) for group in singles.values()),
        longs=tuple(longs),
        packed=packed.pack(together, block_size_tokens=block_size_tokens, device=device)
        if together
        else None,
    )


def _together(
    group: Sequence[tuple[int, list[int], int]], device: torch.device, dtype: torch.dtype
) -> SingleTokens:
    most, longest = max(len(blocks) for _, blocks, _ in group), max(end for _, _, end in group)
    mask = None
    if any(end != longest for _, _, end in group):
        ends = torch.tensor([end for _, _, end in group], device=device)
        beyond = torch.arange(longest, device=device)[None, :] >= ends[:, None]
        mask = torch.zeros(len(group), longest, dtype=dtype, device=device).masked_fill_(beyond, -math.inf)
    return SingleTokens(
        rows=torch.tensor([row for row, _, _ in group], device=device),
        blocks=torch.tensor([blocks + [0] * (most - len(blocks)) for _, blocks, _ in group], device=device),
        end=longest,
        mask=mask,
    )
