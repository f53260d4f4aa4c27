"""Distinguishes the KV of different models by a hash over the configuration and weights in the model's
folder. Caller: the served tiers.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

from model_server.tiers.errors import StoreError

_PIECE_BYTES = 1 << 24


def of_model(folder: Path) -> str:
    """Return the hash of all files that decide the KV of the model in this folder. Raise StoreError if the
    folder has no weights.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise StoreError(
            f"{folder} has no *.safetensors files, which the KV store needs to distinguish models"
        )
    digest = xxhash.xxh3_128()
    for path in (folder / "config.json", *weights):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()
