"""Records how important each token of a node was to the requests that used it, as a running mean for each
layer. A mean over requests is kept because one request's attention says little about the attention of the
next. The caller normalizes weights, so that each request has the same weight, however many queries it had. A
request may have used only the beginning of the node; then only these tokens are counted. This module does no
I/O. Caller: `learnt`, which splits the importance together with its node.

Invariants (`check_integrity`): every layer has a mean for each token, and none is negative. Tokens that no
request has used have zero, and come after the used tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class NodeImportance:
    def __init__(self, *, num_layers: int, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._uses = array("L", bytes(array("L").itemsize * num_tokens))
        self._means = [array("d", bytes(8 * num_tokens)) for _ in range(num_layers)]
        self._reads = [array("L", bytes(array("L").itemsize * num_tokens)) for _ in range(num_layers)]

    @property
    def num_layers(self) -> int:
        return len(self._means)

    @property
    def num_requests(self) -> int:
        return self._uses[0]

    def record(self, weights: Sequence[Sequence[float]], *, chosen: Sequence[Iterable[int]] = ()) -> None:
        """Record the weights of one request, (layer, token), for the node's first tokens or for all its
        tokens, and the tokens that each layer read for the request.
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

        for reads, tokens in zip(self._reads, chosen, strict=bool(chosen)):
            for token in tokens:
                reads[token] += 1

    def means(self, layer: int) -> Sequence[float]:
        return self._means[layer]

    def reads(self, layer: int) -> Sequence[int]:
        """Return the number of requests that read each token since the process started."""
        return self._reads[layer]

    def split(self, num_tokens: int) -> tuple[NodeImportance, NodeImportance]:
        """Return the importance of the first `num_tokens` tokens, and of the other tokens, because the node
        was split between them.
        """
        assert 0 < num_tokens < self.num_tokens
        return self._part(slice(0, num_tokens)), self._part(slice(num_tokens, self.num_tokens))

    def _part(self, tokens: slice) -> NodeImportance:
        part = NodeImportance(num_layers=self.num_layers, num_tokens=tokens.stop - tokens.start)
        part._uses = self._uses[tokens]
        part._means = [means[tokens] for means in self._means]
        part._reads = [reads[tokens] for reads in self._reads]
        return part

    def check_integrity(self) -> None:
        assert len(self._uses) == self.num_tokens
        assert list(self._uses) == sorted(self._uses, reverse=True)
        for means in self._means:
            assert len(means) == self.num_tokens
            assert all(mean >= 0 for mean in means)
            assert not any(mean for mean, uses in zip(means, self._uses, strict=True) if not uses)
        for reads in self._reads:
            assert len(reads) == self.num_tokens
            assert all(read <= uses for read, uses in zip(reads, self._uses, strict=True))
