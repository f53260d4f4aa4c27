"""The rules of the picker's Role, from the file of the chart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parents[2] / "deploy" / "helm" / "prefix-gateway" / "files" / "picker-rules.yaml"


def rules(*, pools: Sequence[str] = ("{pool}",)) -> list[dict[str, Any]]:
    """Return the rules with the names of an installation in place of the placeholders."""
    text = FILE.read_text().replace("'{pool}'", f"[{', '.join(pools)}]")
    found: list[dict[str, Any]] = yaml.safe_load(text)
    for rule in found:
        if isinstance(rule.get("resourceNames", [""])[0], list):
            rule["resourceNames"] = rule["resourceNames"][0]
    return found
