"""Keeps what requests have shown about the nodes of a store: the importance of each node's tokens, and which
nodes are due to be reordered.

A node that came back with other blocks starts without importance. A node is due after 2 requests that used
it. Later it is due each time the number of its requests has doubled since it was reordered, because means
change more and more slowly.

Invariants (`check_integrity`): a node's importance covers exactly the tokens of its blocks; nodes that are
due or reordered have importance. This module does no I/O. Caller: the tiered reader, in its own
thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

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
        self.num_tokens = num_tokens
        self._uses = array("L", bytes(array("L").itemsize * num_tokens))
        self._means = [array("d", bytes(8 * num_tokens)) for _ in range(num_layers)]

    @property
    def num_layers(self) -> int:
        return len(self._means)

    @property
    def num_requests(self) -> int:
        return self._uses[0]

    def record(self, weights: Sequence[Sequence[float]]) -> None:
        """Record the weights of one request, (layer, token), for the node's first tokens or for all its
        tokens.
        """
        num_used = len(weights[0]) if weights else 0
        fits = len(weights) == self.num_layers and 0 < num_used <= self.num_tokens
        if not fits or any(len(layer) != num_used for layer in weights):
            raise ValueError(
                f"the weights must have {self.num_layers} layers and at most {self.num_tokens} tokens"
            )
        for token in range(num_used):
            self._uses[token] += 1
        for means, layer in zip(self._means, weights, strict=True):
            for token, weight in enumerate(layer):
                means[token] += (weight - means[token]) / self._uses[token]

    def means(self, layer: int) -> Sequence[float]:
        return self._means[layer]

    def check_integrity(self) -> None:
        assert len(self._uses) == self.num_tokens
        assert list(self._uses) == sorted(self._uses, reverse=True)
        for means in self._means:
            assert len(means) == self.num_tokens
            assert all(mean >= 0 for mean in means)
            assert not any(mean for mean, uses in zip(means, self._uses, strict=True) if not uses)


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
