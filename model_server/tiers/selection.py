"""Chooses, layer by layer, the tokens of a stored prefix that a request's new queries need, by a probe with a
few heads. The keys of the first heads are read for all tokens. The softmax weights of the new queries on
these keys give each head its top-k set. If these sets are similar enough, the layer gets the tokens with the
greatest mean weight over these heads. Otherwise the layer gets all tokens, so that its output is exact.
Chosen tokens that are alone in a chunk may be exchanged for tokens of chunks that are read anyway. With
grouped queries the keys are those of the KV heads that the first query heads use.

Callers: the selective view; the accuracy benchmark, which compares other choices.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from model_server.runners.hf.views import attention_weights
from model_server.tiers.settings import EVERY_CHUNK, SelectionSettings
from model_server.tiers.similarity import mean_jaccard, threshold


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The tokens of the prefix that one layer reads."""

    tokens: torch.Tensor | None
    """The logical positions of the chosen tokens in ascending order. None means all tokens."""
    importance: torch.Tensor | None = None
    """The mean weight that a probed query gave each token, with the shape (prefix tokens,). None means that
    no query was probed.
    """
    similarity: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The inputs of a choice in one layer."""

    layer: int
    num_prefix_tokens: int
    query: torch.Tensor
    """The queries of the new tokens, with the shape (queries, head, dim)."""
    keys: torch.Tensor
    """The keys of the prefix tokens, then the keys of later tokens up to the last query's own, with the shape
    (tokens, probed KV head, dim).
    """
    scaling: float
    chunks: torch.Tensor | None = None
    """The number of each token's chunk, from 0, with the shape (prefix tokens,). None means that nothing is
    read in chunks.
    """


Chooser = Callable[[Seen], Choice]


def num_probe_kv_heads(settings: SelectionSettings, *, num_heads: int, num_kv_heads: int) -> int:
    """Return the number of KV heads that serve the probed query heads. These are the first KV heads."""
    return -(-min(settings.probe_heads, num_heads) * num_kv_heads // num_heads)


def head_weights(seen: Seen, *, num_heads: int, group: int) -> torch.Tensor:
    """Return the mean weights over the new queries, for the first `num_heads` query heads, with the shape
    (head, prefix token). `group` query heads share a KV head.
    """
    queries = seen.query.shape[0]
    keys = seen.keys[:, [head // group for head in range(num_heads)]]
    weights = attention_weights(
        seen.query[:, :num_heads],
        keys,
        scaling=seen.scaling,
        visible=visible_to(queries, keys.shape[0] - queries, device=keys.device),
    )
    return weights[:, :, : seen.num_prefix_tokens].mean(1)


def visible_to(queries: int, num_before: int, *, device: torch.device) -> torch.Tensor:
    """Return a mask of the shape (queries, before + queries). A query sees all earlier tokens, and the new
    tokens up to its own.
    """
    ones = torch.ones(queries, num_before + queries, dtype=torch.bool, device=device)
    return ones.tril(diagonal=num_before)


def probe(seen: Seen, *, settings: SelectionSettings, group: int) -> Choice:
    """Choose the tokens of one layer by the probed heads. `group` is the number of query heads for each KV
    head.
    """
    heads = head_weights(seen, num_heads=min(settings.probe_heads, seen.query.shape[1]), group=group)
    return choose(heads, settings=settings, chunks=seen.chunks)


def choose(heads: torch.Tensor, *, settings: SelectionSettings, chunks: torch.Tensor | None) -> Choice:
    """Choose tokens by the probed heads' weights, which have the shape (head, prefix token). `chunks` is as
    in `Seen`.
    """
    num_tokens = heads.shape[1]
    kept = settings.kept(num_tokens)
    importance = heads.mean(0)
    sets = [set(head.topk(kept).indices.tolist()) for head in heads]
    similarity = mean_jaccard(sets)
    if similarity < threshold(kept, num_tokens, alpha=settings.alpha):
        return Choice(None, importance, similarity)
    chosen = importance.topk(kept).indices
    if chunks is not None and settings.chunk_share < EVERY_CHUNK:
        chosen = in_few_chunks(importance, chosen, chunks=chunks, share=settings.chunk_share)
    return Choice(chosen.sort().values, importance, similarity)


def in_few_chunks(
    importance: torch.Tensor, chosen: torch.Tensor, *, chunks: torch.Tensor, share: float
) -> torch.Tensor:
    """Return as many tokens as `chosen`, from fewer chunks. These chunks hold most of the chosen tokens'
    weight, up to `share` of it.

    A chosen token that is alone in its chunk costs a whole chunk. The next-best token of a chunk that is read
    anyway costs nothing.
    """
    held = torch.zeros(int(chunks.max()) + 1, dtype=torch.float64, device=importance.device)
    held.index_add_(0, chunks[chosen], importance[chosen].double())
    sizes = torch.bincount(chunks, minlength=len(held))
    by_weight = held.argsort(descending=True, stable=True)
    so_far, room = held[by_weight].cumsum(0), sizes[by_weight].cumsum(0)
    enough = (so_far >= share * so_far[-1]) & (room >= len(chosen))
    read = torch.zeros(len(held), dtype=torch.bool, device=importance.device)
    read[by_weight[: int(enough.nonzero()[0]) + 1]] = True
    return importance.masked_fill(~read[chunks], -1.0).topk(len(chosen)).indices
