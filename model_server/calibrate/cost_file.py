"""The file of a calibration, as YAML. JSON is accepted too, since JSON is also YAML."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import msgspec
import yaml

from model_server.runners.cost import CostModel


class _File(msgspec.Struct):
    """Files of release 0.1 have more fields, which nothing reads."""

    costs: dict[str, float]


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


def cost_document(costs: CostModel) -> str:
    """Return the text of the file. `speed` is not a cost and is left out."""
    figures = {name: float(f"{value:.6g}") for name, value in asdict(costs).items() if name != "speed"}
    return yaml.safe_dump({"costs": figures}, sort_keys=False)
