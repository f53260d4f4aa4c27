"""How much each token of a node mattered to the requests that used it: a running mean for each layer.

One request's attention says little about the next one's, so nothing is forgotten but by the mean. Weights come normalised by
the caller: each request counts once, however many queries it had. Pure. Callers: the prefix store, which splits it with its node.

Invariants (`check_integrity`): every layer has a mean for each token, none negative; without requests all are zero.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import nlargest


class NodeImportance:
    def __init__(self, *, num_layers: int, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_requests = 0
        self._means = [array("d", bytes(8 * num_tokens)) for _ in range(num_layers)]

    @property
    def num_layers(self) -> int:
        return len(self._means)

    def record(self, weights: Sequence[Sequence[float]]) -> None:
        """One request's weights, (layer, token)."""
        if len(weights) != self.num_layers or any(len(layer) != self.num_tokens for layer in weights):
            raise ValueError(f"weights of {self.num_layers} layers and {self.num_tokens} tokens are wanted")
        self.num_requests += 1
        share = 1 / self.num_requests
        for means, layer in zip(self._means, weights, strict=True):
            for token, weight in enumerate(layer):
                means[token] += (weight - means[token]) * share

    def means(self, layer: int) -> Sequence[float]:
        return self._means[layer]

    def top(self, layer: int, count: int) -> set[int]:
        """The `count` tokens that mattered most; earlier ones among equals. None before the first request."""
        if not self.num_requests:
            return set()
        means = self._means[layer]
        return set(nlargest(count, range(self.num_tokens), key=lambda token: (means[token], -token)))

    def split(self, num_tokens: int) -> tuple[NodeImportance, NodeImportance]:
        """What the first `num_tokens` tokens mattered, and the others: the node was split there."""
        assert 0 < num_tokens < self.num_tokens
        return self._part(slice(0, num_tokens)), self._part(slice(num_tokens, self.num_tokens))

    def _part(self, tokens: slice) -> NodeImportance:
        part = NodeImportance(num_layers=self.num_layers, num_tokens=tokens.stop - tokens.start)
        part.num_requests = self.num_requests
        part._means = [means[tokens] for means in self._means]
        return part

    def check_integrity(self) -> None:
        assert self.num_requests >= 0
        for means in self._means:
            assert len(means) == self.num_tokens
            assert all(mean >= 0 for mean in means)
            assert self.num_requests or not any(means)
