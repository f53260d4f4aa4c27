"""Linear layers whose float32 weights lie in the order in which oneDNN's kernels read them, for steps on a CPU.

torch's own product of a few rows with a large matrix reads the matrix at a fraction of what the processor can: a decode
step is such products and little else. The order is chosen once, when a model is loaded; the results are the same sums in
another order. Caller: `model.load`. Weights are only read here: a packed layer cannot be trained or changed.
"""

from __future__ import annotations

from typing import Any

import torch

_ROWS = 64
"""Packed for so many: of 1 to 600 rows, an order made for 8 to 512 is as good and one for 1 is worse."""
_OPS = ("_reorder_linear_weight", "_linear_pointwise")


class PackedLinear(torch.nn.Module):  # type: ignore[misc] # torch is not where mypy runs
    """Takes a linear layer's place, under its name and with its shape."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        reorder = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001 - torch's own compiler uses these two
        self.register_buffer("weight", reorder(linear.weight.detach(), _ROWS), persistent=False)
        self.register_buffer("bias", linear.bias, persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        multiply = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - as above
        product: torch.Tensor = multiply(rows, self.weight, self.bias, "none", [], "")
        return product

    def __deepcopy__(self, memo: dict[int, object]) -> PackedLinear:
        """Weights are shared, since nobody changes them and torch cannot copy what it cannot see; hooks stay behind."""
        copied = PackedLinear.__new__(PackedLinear)
        torch.nn.Module.__init__(copied)
        copied.in_features, copied.out_features = self.in_features, self.out_features
        copied.register_buffer("weight", self.weight, persistent=False)
        copied.register_buffer("bias", self.bias, persistent=False)
        memo[id(self)] = copied
        return copied


def pack(module: Any) -> int:
    """Pack every linear layer of a model that computes in float32 on a CPU; how many. A torch without oneDNN packs none."""
    if module.device.type != "cpu" or module.dtype != torch.float32 or not _can_pack():
        return 0
    found = [
        (parent, name, layer)
        for parent in module.modules()
        for name, layer in parent.named_children()
        if type(layer) is torch.nn.Linear
    ]
    with torch.no_grad():
        for parent, name, layer in found:
            setattr(parent, name, PackedLinear(layer))
    return len(found)


def _can_pack() -> bool:
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, op) for op in _OPS)
