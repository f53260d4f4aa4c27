"""Computes several LoRA adapters in PEFT's format in one step. Each adapter adds its low-rank part to the
rows of its own requests.

A hook on every adapted projection adds `scale · B(A(x))` to the output rows of the requests that named the
adapter, and leaves the other rows alone. Keys and values of adapted requests differ from those of the base
model. So the core never lets two adapters share blocks. A block is named by the adapter's name and path. So
an adapter whose file has changed in place is refused, because the cached blocks would belong to the old file.

An unloaded adapter stays in memory until no request uses it.

Callers: the model (sets a step's rows) and the server (loads and unloads), both in the thread that computes
steps.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from model_server.core.request import Adapter
from model_server.core.scheduler import Chunk
from model_server.runners.hf.errors import AdapterError

_MOST_BYTES = {"adapter_config.json": 1 << 20, "adapter_model.safetensors": 4 << 30}
_PIECE_BYTES = 1 << 20
_MOST_KNOWN = 4096
"""The most adapters whose digest of files is remembered, loaded or not."""
_PREFIX = "base_model.model."
_REFUSED: dict[str, object] = {
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
}
"""Fields of adapter_config.json that change the computation. Each has the value that changes nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The adapter's part for one projection: down (rank, inputs) and up (outputs, rank). `up` already
    contains the scale.
    """

    down: torch.Tensor
    up: torch.Tensor


class AdapterBank:
    """The adapters of one model, and which adapter each row of a step uses."""

    def __init__(self, module: Any) -> None:
        self._projections = {
            name: layer
            for name, layer in module.named_modules()
            if getattr(getattr(layer, "weight", None), "ndim", 0) == 2
        }
        self._device, self._dtype = module.device, module.dtype
        self._adapters: dict[Adapter, dict[str, LowRank]] = {}
        self._leaving: set[Adapter] = set()
        self._digests: dict[Adapter, bytes] = {}
        self._hooked: set[str] = set()
        self._rows: list[tuple[dict[str, LowRank], torch.Tensor]] = []

    def __len__(self) -> int:
        """Return the number of adapters in memory, including those that wait for their last requests."""
        return len(self._adapters)

    def load(self, adapter: Adapter) -> None:
        """Read the adapter from its folder. Raise AdapterError if the folder holds no adapter, or the adapter
        does not fit this model. After an error the bank is as before.
        """
        folder = Path(adapter.path)
        digest = _digest(folder)
        if self._digests.get(adapter, digest) != digest:
            raise AdapterError(
                f"{adapter.path} has changed since {adapter.name!r} was loaded from it, and blocks of the old adapter may be "
                "cached: load it from another path or under another name"
            )
        if adapter not in self._digests and len(self._digests) >= _MOST_KNOWN:
            raise AdapterError(
                f"{_MOST_KNOWN} different adapters have been loaded since this server started: restart it to load another adapter"
            )
        parts = self._read(folder)
        if _digest(folder) != digest:
            raise AdapterError(f"{adapter.path} has changed while it was read: load it again")
        for name in parts.keys() - self._hooked:
            self._projections[name].register_forward_hook(self._hook(name))
            self._hooked.add(name)
        self._digests[adapter] = digest
        self._adapters[adapter] = parts
        self._leaving.discard(adapter)

    def unload(self, adapter: Adapter, *, in_use: Collection[Adapter]) -> None:
        """Drop the adapter when no request uses it. `in_use` are the adapters that unfinished requests use
        now.
        """
        self._leaving.add(adapter)
        for gone in self._leaving - set(in_use):
            self._adapters.pop(gone, None)
            self._leaving.discard(gone)

    def begin_step(self, chunks: Sequence[Chunk]) -> None:
        """Set the rows of a step, which follow the order of its chunks."""
        rows: defaultdict[Adapter, list[int]] = defaultdict(list)
        first = 0
        for chunk in chunks:
            if chunk.request.adapter is not None:
                rows[chunk.request.adapter] += range(first, first + chunk.num_tokens)
            first += chunk.num_tokens
        self._rows = [
            (self._adapters[adapter], torch.tensor(wanted, device=self._device))
            for adapter, wanted in rows.items()
        ]

    def check_integrity(self) -> None:
        """Raise AssertionError if the adapters, the hooks and the model disagree."""
        assert self._leaving <= self._adapters.keys() <= self._digests.keys()
        wanted = {name for parts in self._adapters.values() for name in parts}
        assert wanted <= self._hooked <= self._projections.keys()

    def _hook(self, name: str) -> Callable[[Any, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def add(_module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            for parts, rows in self._rows:
                part = parts.get(name)
                if part is not None:
                    flat = inputs[0].reshape(-1, inputs[0].shape[-1])
                    low = flat[rows] @ part.down.T
                    output.view(-1, output.shape[-1]).index_add_(0, rows, low @ part.up.T)

        return add

    def _read(self, folder: Path) -> dict[str, LowRank]:
        scale = _scale(_config(folder))
        try:
            tensors = load_file(folder / "adapter_model.safetensors", device="cpu")
        except (OSError, SafetensorError) as error:
            raise AdapterError(
                f"{folder} holds no adapter_model.safetensors that can be read: {error}"
            ) from error
        halves: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for key, tensor in tensors.items():
            name, _, half = key.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
            halves[name][half] = tensor
        return {name: self._part(name, both, scale) for name, both in halves.items()}

    def _part(self, name: str, halves: dict[str, torch.Tensor], scale: float) -> LowRank:
        if halves.keys() != {"lora_A", "lora_B"}:
            raise AdapterError(f"{name} has {sorted(halves)}, but an adapter's layer needs lora_A and lora_B")
        layer = self._projections.get(name)
        if layer is None:
            raise AdapterError(f"the adapter is for another model: this model has no {name}")
        down, up = halves["lora_A"], halves["lora_B"]
        wanted = _inputs_and_outputs(layer)
        if (down.shape[1], up.shape[0]) != wanted or down.shape[0] != up.shape[1]:
            raise AdapterError(
                f"the adapter is for another model: {name} has {wanted} inputs and outputs in this model, but the shapes of lora_A and "
                f"lora_B are {tuple(down.shape)} and {tuple(up.shape)}"
            )
        place = {"device": self._device, "dtype": self._dtype}
        return LowRank(down.to(**place), (up.float() * scale).to(**place))


def _inputs_and_outputs(layer: Any) -> tuple[int, int]:
    """Return the sizes of a linear layer, or of GPT-2's own kind of layer, whose weights are transposed."""
    if hasattr(layer, "in_features"):
        return int(layer.in_features), int(layer.out_features)
    return int(layer.weight.shape[0]), int(layer.weight.shape[1])


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
    except (OSError, ValueError) as error:
        raise AdapterError(f"{folder} holds no adapter_config.json that can be read: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterError(f"{folder} is not a LoRA adapter in PEFT's format")
    for name, neutral in _REFUSED.items():
        if config.get(name) not in (None, neutral):
            raise AdapterError(
                f"{folder}/adapter_config.json sets {name}, which this engine does not support"
            )
    return config


def _scale(config: dict[str, Any]) -> float:
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (KeyError, TypeError, ValueError) as error:
        raise AdapterError(f"adapter_config.json has no usable r and lora_alpha: {error}") from error
    if rank < 1:
        raise AdapterError(f"adapter_config.json has the rank {rank}, but a rank is at least 1")
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _digest(folder: Path) -> bytes:
    """Return the digest of the files. The function first checks that they are regular files of a size that an
    adapter can have, then reads them in pieces.
    """
    digest = hashlib.sha256()
    for name, most in _MOST_BYTES.items():
        try:
            file = (folder / name).stat()
            if not stat.S_ISREG(file.st_mode) or file.st_size > most:
                raise AdapterError(f"{folder / name} is not a regular file of at most {most:,} bytes")
            with (folder / name).open("rb") as content:
                while piece := content.read(_PIECE_BYTES):
                    digest.update(piece)
        except (OSError, ValueError) as error:
            raise AdapterError(f"{folder} is not an adapter: {error}") from error
    return digest.digest()
