"""The file of a calibration: the costs, how well they fit, and the server on which they were measured. The
file is YAML. JSON is accepted too, since JSON is also YAML.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import yaml

from model_server.runners.cost import CostModel


class _File(msgspec.Struct, forbid_unknown_fields=True):
    costs: dict[str, float]
    fit: dict[str, Any] = msgspec.field(default_factory=dict)
    source: dict[str, Any] = msgspec.field(default_factory=dict)


def read_costs(path: Path) -> CostModel:
    """Return the costs in a file that `model-server calibrate` wrote. Raise ValueError with the reason if the
    file cannot be read or has other content.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the costs in {path} cannot be read: {error}") from error
    try:
        file = msgspec.convert(yaml.safe_load(text), _File)
        return CostModel(**file.costs)
    except (msgspec.ValidationError, yaml.YAMLError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())  # YAML's own messages have several lines
        raise ValueError(
            f"{path} is not a file of costs that `model-server calibrate` wrote: {why}"
        ) from error


def cost_document(costs: CostModel, *, fit: dict[str, Any], source: dict[str, Any]) -> str:
    """Return the text of the file. `speed` is not a cost and is left out."""
    figures = {name: float(f"{value:.6g}") for name, value in asdict(costs).items() if name != "speed"}
    return yaml.safe_dump({"costs": figures, "fit": fit, "source": source}, sort_keys=False)
