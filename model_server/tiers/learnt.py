"""Keeps what requests have shown about the nodes of a store: the importance of each node's tokens, and which
nodes are due to be reordered.

A node that came back with other blocks starts without importance. A node is due after 2 requests that used
it. Later it is due each time the number of its requests has doubled since it was reordered, because means
change more and more slowly.

Invariants (`check_integrity`): a node's importance covers exactly the tokens of its blocks; nodes that are
due or reordered have importance. This module does no I/O. Caller: the tiered reader, in its own
thread.
"""

from collections.abc import Collection, Sequence

import numpy as np

from model_server.core.hashing import BlockHash
from model_server.tiers.layout import TokenOrder

Blocks = tuple[BlockHash, ...]


class NodeImportance:
    """How important each token of a node was to the requests that used it, as a running mean for each layer.
    A mean over requests is kept because one request's attention says little about the attention of the next.
    The caller normalizes weights, so that each request has the same weight. A request may have used only the
    beginning of the node; then only these tokens are counted.

    Invariants (`check_integrity`): every layer has a mean for each token, and none is negative. Tokens that
    no request has used have zero, and come after the used tokens.
    """

    def __init__(self, *, num_layers: int, num_tokens: int) -> None:
        self._uses = np.zeros(num_tokens)
        self._means = np.zeros((num_layers, num_tokens))

    @property
    def num_tokens(self) -> int:
        return len(self._uses)

    @property
    def num_layers(self) -> int:
        return len(self._means)

    @property
    def num_requests(self) -> int:
        return int(self._uses[0])

    def record(self, weights: Sequence[Sequence[float]]) -> None:
        """Record the weights of one request, (layer, token), for the node's first tokens or for all its
        tokens.
        """
        own, (num_layers, num_tokens) = np.array(weights, dtype=float), self._means.shape
        if own.ndim != 2 or len(own) != num_layers or not 0 < own.shape[1] <= num_tokens:
            raise ValueError(f"the weights must have {num_layers} layers and at most {num_tokens} tokens")
        used = slice(own.shape[1])
        self._uses[used] += 1
        self._means[:, used] += (own - self._means[:, used]) / self._uses[used]

    def means(self, layer: int) -> Sequence[float]:
        means: list[float] = self._means[layer].tolist()
        return means

    def check_integrity(self) -> None:
        assert (np.diff(self._uses) <= 0).all()
        assert (self._means >= 0).all()
        assert not self._means[:, self._uses == 0].any()


class Learnt:
    def __init__(self, *, num_layers: int, block_tokens: int) -> None:
        self._num_layers = num_layers
        self._block_tokens = block_tokens
        self._importance: dict[BlockHash, tuple[Blocks, NodeImportance]] = {}
        self._reordered_at: dict[BlockHash, int] = {}
        self._due: dict[BlockHash, None] = {}

    def known(self, blocks: Blocks) -> NodeImportance | None:
        """Return the importance of a node with exactly these blocks, or None before its first request."""
        found = self._importance.get(blocks[0])
        return found[1] if found is not None and found[0] == blocks else None

    def record(self, blocks: Blocks, weights: Sequence[Sequence[float]]) -> None:
        """Add the attention weights of one request to the node's importance. `weights` (layer, token) are for
        the node's first tokens or for all its tokens.
        """
        importance = self.known(blocks)
        if importance is None:
            importance = NodeImportance(
                num_layers=self._num_layers, num_tokens=len(blocks) * self._block_tokens
            )
            self._importance[blocks[0]] = blocks, importance
            self._reordered_at.pop(blocks[0], None)
        importance.record(weights)
        if importance.num_requests >= 2 * max(1, self._reordered_at.get(blocks[0], 0)):
            self._due[blocks[0]] = None

    def next_due(self) -> BlockHash | None:
        """Return a node that is due, or None if no node is due. Each node is returned once."""
        name = next(iter(self._due), None)
        if name is not None:
            del self._due[name]
        return name

    def orders(self, blocks: Blocks) -> list[TokenOrder] | None:
        """Return for each layer the node's tokens in the order of importance. Return None if nothing is known
        about these tokens. From now on the node counts as reordered.
        """
        importance = self.known(blocks)
        if importance is None:
            return None
        self._reordered_at[blocks[0]] = importance.num_requests
        return [TokenOrder.by_importance(importance.means(layer)) for layer in range(self._num_layers)]

    def keep(self, names: Collection[BlockHash]) -> None:
        """Forget all nodes but these, because the others are no longer stored."""
        for name in [name for name in self._importance if name not in names]:
            del self._importance[name]
            self._reordered_at.pop(name, None)
            self._due.pop(name, None)

    def check_integrity(self) -> None:
        for name, (blocks, importance) in self._importance.items():
            importance.check_integrity()
            assert blocks[0] == name
            assert len(blocks) * self._block_tokens == importance.num_tokens
        assert self._due.keys() | self._reordered_at.keys() <= self._importance.keys()
