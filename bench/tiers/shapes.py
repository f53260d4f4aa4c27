"""Describes models of which only the shape is available: the sizes of their KV and weights, and the
computation of one layer.

`RealCompute` multiplies random weights of the shape, on a GPU or, for small shapes, anywhere.
`ImposedCompute` waits at least as long as a stated accelerator would need, where there is none.
"""

import time
from dataclasses import dataclass

import torch
from torch.nn.functional import relu, scaled_dot_product_attention

from model_server.runners.hf.memory import KvShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder with as many KV heads as query heads, and a feed-forward layer of four times its width, like
    OPT.
    """

    name: str
    layers: int
    heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        return 12 * self.width * self.width

    def kv(self, *, layers: int, head_dim: int | None = None) -> KvShape:
        return KvShape(
            num_layers=layers,
            num_kv_heads=self.heads,
            head_dim=head_dim or self.head_dim,
            dtype=torch.float16,
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="opt-30b", layers=48, heads=56, head_dim=128),
        Shape(name="opt-13b", layers=40, heads=40, head_dim=128),
        Shape(name="tiny", layers=4, heads=6, head_dim=8),
    )
}


class Compute:
    """Computes nothing, for benches that only count bytes."""

    def layer(self, new_tokens: int, keys: torch.Tensor | None, values: torch.Tensor | None) -> None:
        """Compute one layer over new tokens that attend to these keys and values (tokens, head, dim) and to
        each other.
        """

    def look(self, new_tokens: int, keys: torch.Tensor) -> None:
        """Compute the weights of the new tokens on the probed keys (tokens, head, dim)."""

    def finish(self) -> None:
        """Wait until all computation is done."""


class ImposedCompute(Compute):
    """Takes at least the time of its multiplications, and at least the time for reading the weights."""

    def __init__(self, shape: Shape, *, flops_per_s: float, weights_bytes_per_s: float) -> None:
        self.per_token_s = 2 * shape.layer_weights / flops_per_s
        self._at_least_s = 2 * shape.layer_weights / weights_bytes_per_s

    def layer(self, new_tokens: int, keys: torch.Tensor | None, values: torch.Tensor | None) -> None:
        time.sleep(max(self._at_least_s, new_tokens * self.per_token_s))


class RealCompute(Compute):
    """Uses `distinct` layers of random weights in turns. Each layer is larger than any cache of a GPU."""

    def __init__(self, shape: Shape, *, device: torch.device, dtype: torch.dtype, distinct: int = 4) -> None:
        torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan the attention of each new length
        self._shape, self._device, self._dtype = shape, device, dtype
        width = shape.width
        options = {"device": device, "dtype": dtype}
        self._layers = [
            [
                torch.randn(rows, columns, **options) / columns**0.5
                for rows, columns in (
                    (3 * width, width),
                    (width, width),
                    (4 * width, width),
                    (width, 4 * width),
                )
            ]
            for _ in range(distinct)
        ]
        self._next = 0
        self._hidden = torch.randn(4096, width, **options)

    def layer(self, new_tokens: int, keys: torch.Tensor | None, values: torch.Tensor | None) -> None:
        attention_in, attention_out, up, down = self._layers[self._next % len(self._layers)]
        self._next += 1
        hidden = self._hidden[:new_tokens]
        query, own_keys, own_values = (
            part.unflatten(1, (self._shape.heads, -1)) for part in (hidden @ attention_in.T).chunk(3, dim=1)
        )
        if keys is not None and values is not None:
            own_keys = torch.cat((keys.to(self._dtype), own_keys))
            own_values = torch.cat((values.to(self._dtype), own_values))
        before = own_keys.shape[0] - new_tokens
        visible = torch.ones(new_tokens, own_keys.shape[0], dtype=torch.bool, device=self._device).tril(
            before
        )
        attended = scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in (query, own_keys, own_values)), attn_mask=visible
        )
        hidden = hidden + attended[0].transpose(0, 1).flatten(1) @ attention_out.T
        self._last = hidden + relu(hidden @ up.T) @ down.T

    def look(self, new_tokens: int, keys: torch.Tensor) -> None:
        query = self._hidden[:new_tokens, : keys.shape[1] * keys.shape[2]].unflatten(1, keys.shape[1:])
        torch.einsum("qhd,khd->hqk", query, keys.to(self._dtype)).softmax(-1).mean(1).topk(1).indices.tolist()

    def finish(self) -> None:
        float(self._last.sum())
