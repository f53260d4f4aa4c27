"""Makes linear layers fast on a CPU: their float32 weights lie in memory in the order in which oneDNN's
kernels read them.

torch's own product of a few rows with a large matrix reads the matrix at a fraction of the processor's speed,
and a decode step consists almost only of such products. Layers with the same input rows (queries, keys and
values; the two of a gated feed-forward layer) become one product. The weights are put into this order once,
when a model is loaded. A product adds up the same terms as torch does, in another sequence. A packed layer
cannot be trained or changed, because this module only reads weights. Caller: `model.load`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

_ROWS = 64
"""The weights are packed for this number of rows. For products of 1 to 600 rows, an order made for 8 to 512
rows is equally good, and an order made for 1 row is worse.
"""
_OPS = ("_reorder_linear_weight", "_linear_pointwise")

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Children of one module to which transformers' models give the same rows, by name."""


class SharedProduct:
    """The product of some rows with the weights of several layers. The product is computed when the first of
    these layers is called, and kept for the other layers.

    Rows are recognized by identity. A layer with other rows computes the whole product for itself, which is
    slow but correct.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, num_layers: int) -> None:
        """`weight` must be packed already."""
        self.weight, self.bias, self._num_layers = weight, bias, num_layers
        self._rows: torch.Tensor | None = None
        self._product: torch.Tensor | None = None
        self._waiting = 0

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        product = self._product if rows is self._rows else None
        if product is None:
            multiply = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - torch's own compiler uses it
            product = multiply(rows, self.weight, self.bias, "none", [], "")
            self._waiting = self._num_layers
        self._waiting -= 1
        # The product is dropped when all layers have their part.
        self._rows, self._product = (rows, product) if self._waiting else (None, None)
        return product

    def __deepcopy__(self, memo: dict[int, object]) -> SharedProduct:
        """Share the weights, because no code changes them and torch cannot copy packed weights."""
        copied = memo[id(self)] = SharedProduct(self.weight, self.bias, num_layers=self._num_layers)
        return copied


class PackedLinear(torch.nn.Module):  # type: ignore[misc] # torch is not installed where mypy runs
    """Replaces a linear layer under the same name and with the same shape. Its output is some columns of a
    product.
    """

    weight: torch.Tensor
    """The weight of the whole product."""

    def __init__(self, linear: torch.nn.Linear, product: SharedProduct, *, first_column: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._product, self._first = product, first_column
        self.register_buffer("weight", product.weight, persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._product.of(rows)[..., self._first : self._first + self.out_features]

    def __deepcopy__(self, memo: dict[int, object]) -> PackedLinear:
        """Copy the layer without its hooks."""
        copied = PackedLinear(self, copy.deepcopy(self._product, memo), first_column=self._first)
        memo[id(self)] = copied
        return copied


def pack(module: Any) -> int:
    """Pack every linear layer of a model that computes in float32 on a CPU. Return the number of packed
    layers. A torch without oneDNN packs none.
    """
    if module.device.type != "cpu" or module.dtype != torch.float32 or not _can_pack():
        return 0
    found = [(parent, names) for parent in module.modules() for names in _groups(parent)]
    with torch.no_grad():
        for parent, names in found:
            _pack_together(parent, names)
    return sum(len(names) for _, names in found)


def _groups(parent: Any) -> list[tuple[str, ...]]:
    """Return the names of a module's linear layers, grouped by equal input rows."""
    linear = {name: layer for name, layer in parent.named_children() if type(layer) is torch.nn.Linear}
    together = [
        names
        for names in _TOGETHER
        if linear.keys() >= set(names)
        and len({(linear[name].in_features, linear[name].bias is None) for name in names}) == 1
    ]
    grouped = {name for names in together for name in names}
    return [*together, *((name,) for name in linear if name not in grouped)]


def _pack_together(parent: Any, names: Sequence[str]) -> None:
    layers = [getattr(parent, name) for name in names]
    reorder = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001 - as above
    weight = reorder(torch.cat([layer.weight.detach() for layer in layers]), _ROWS)
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    product, first = SharedProduct(weight, bias, num_layers=len(layers)), 0
    for name, layer in zip(names, layers, strict=True):
        setattr(parent, name, PackedLinear(layer, product, first_column=first))
        first += layer.out_features


def _can_pack() -> bool:
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, op) for op in _OPS)
