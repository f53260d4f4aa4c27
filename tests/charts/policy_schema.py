"""`python -m tests.charts.policy_schema`: writes `policy` in the chart's values.schema.json anew, from the CRD of the policy.

helm then refuses what the API server would refuse of a policy object, before anything is installed. `make docs` runs this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from epp.kube.crd import crd
from tests.charts.rendering import GATEWAY

FILE: Final = GATEWAY / "values.schema.json"
_KEPT: Final = (
    *("type", "description", "enum", "minimum", "maximum", "minLength", "maxLength", "pattern"),
    "required",
)
_BLOCK: Final = re.compile(r'^    "policy": \{$.*?^    \},$', re.DOTALL | re.MULTILINE)


def policy_schema() -> dict[str, Any]:
    """Of the value `policy`: a policy's spec without its target, and never only tried, since nothing else would route."""
    spec = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    made = _converted(spec)
    del made["properties"]["targetRef"], made["required"]
    made["properties"]["mode"]["enum"] = ["Enforce"]
    return made


def written(text: str) -> str:
    """The schema file with this in it."""
    block = json.dumps(policy_schema(), indent=2).replace("\n", "\n    ")
    return _BLOCK.sub(lambda _: f'    "policy": {block},', text, count=1)


def _converted(schema: Mapping[str, Any]) -> dict[str, Any]:
    """From OpenAPI 3.0, as a CRD has it, to JSON schema."""
    made = {key: schema[key] for key in _KEPT if key in schema}
    if schema.get("exclusiveMinimum"):
        made["exclusiveMinimum"] = made.pop("minimum")
    if "properties" in schema:
        made["additionalProperties"] = False
        made["properties"] = {name: _converted(each) for name, each in schema["properties"].items()}
    if "items" in schema:
        made["items"] = _converted(schema["items"])
    return made


if __name__ == "__main__":
    FILE.write_text(written(FILE.read_text()))
