"""Makes a model folder with the first layers of another model: the same requests and hits, with a fraction of
the work.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


def first_layers(folder: Path, *, count: int, into: Path) -> Path:
    """Make the folder `into`: the model in `folder` with this many layers, and its tokenizer, embeddings and
    last norm.
    """
    into.mkdir()
    for file in folder.iterdir():
        if file.name not in {_WEIGHTS, _CONFIG}:
            shutil.copy(file, into / file.name)
    config = json.loads((folder / _CONFIG).read_text())
    config["num_hidden_layers"] = count
    (into / _CONFIG).write_text(json.dumps(config))
    weights = load_file(folder / _WEIGHTS)
    kept = {name: weight for name, weight in weights.items() if _layer(name) < count}
    save_file(kept, into / _WEIGHTS, metadata={"format": "pt"})
    return into


def _layer(name: str) -> int:
    """Return the layer of a weight. A weight that belongs to no layer counts as one of the first layer."""
    found = _LAYER.match(name)
    return int(found[1]) if found else 0
