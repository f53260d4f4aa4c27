"""Makes chunks of a reordered layer from the chunks of its old order that are in memory. This module does no
I/O. Caller: the tiered reader.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from model_server.tiers.layout import TokenOrder
from model_server.tiers.segment import KvLayout


def repacked(
    held: Mapping[int, torch.Tensor], old: TokenOrder, new: TokenOrder, *, layout: KvLayout
) -> dict[int, tuple[torch.Tensor, tuple[int, ...]]]:
    """Return the new chunks whose tokens are all in `held` (old chunk -> its bytes), each with the old
    chunks from which it is made.
    """
    size, num_tokens = layout.chunk_tokens, len(old.slots)
    at_hand = {chunk: content.cpu() for chunk, content in held.items() if chunk >= 0}
    records = torch.empty(num_tokens, layout.rest_bytes, dtype=torch.uint8)
    for chunk, content in at_hand.items():
        records[chunk * size : (chunk + 1) * size] = content.view(-1, layout.rest_bytes)
    old_slots = torch.tensor(old.slots)[torch.tensor(new.stored(), dtype=torch.long)]
    made: dict[int, tuple[torch.Tensor, tuple[int, ...]]] = {}
    for chunk in range(layout.num_chunks(num_tokens)):
        slots = old_slots[chunk * size : (chunk + 1) * size]
        sources = (slots // size).unique().tolist()
        if all(source in at_hand for source in sources):
            made[chunk] = records[slots].flatten(), tuple(sources)
    return made
