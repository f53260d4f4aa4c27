"""`python -m tests.charts.policy_schema` writes `policy` and `config` in the chart's values.schema.json anew.

`policy` comes from the CRD of the policy. So helm refuses every policy that the API server would refuse,
before anything is installed. The names of all fields of `config` come from the picker. `make docs` runs this.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from epp.config.settings import Config
from tests.charts.rendering import GATEWAY
from tests.reference.crd import crd
from tests.reference.schema import definitions

FILE: Final = GATEWAY / "values.schema.json"
_KEPT: Final = (
    *("type", "description", "enum", "minimum", "maximum", "minLength", "maxLength", "pattern"),
    "required",
)
_WORKERS: Final = {"type": "integer", "minimum": 1, "maximum": 64}
"""The only field of `config` that the templates read."""


def policy_schema() -> dict[str, Any]:
    """Return the schema of the value `policy`: the spec of a policy without its target. The schema refuses a
    policy in dry run, because then no policy would route.
    """
    spec = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    made = _converted(spec)
    del made["properties"]["targetRef"], made["required"]
    made["properties"]["mode"]["enum"] = ["Enforce"]
    return made


def config_schema() -> dict[str, Any]:
    """Return the schema of the value `config`. The picker itself checks the values of the fields."""
    made = _names("Config", definitions(Config))
    made["properties"]["workers"] = _WORKERS
    made["properties"]["holdStreams"] = {"description": "removed"}
    made["properties"]["envoy"]["properties"]["blockedPaths"] = {"description": "removed"}
    made["properties"]["kubernetes"]["properties"]["status"] = {"description": "removed"}
    text = "The picker's own configuration; the picker checks the values: docs/reference-config.md."
    return {"description": text, **made}


def _names(struct: str, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that knows the fields of a struct, and of the structs in it, and not their values."""
    fields: dict[str, Any] = {}
    for name, schema in sections[struct]["properties"].items():
        parts = [schema, *schema.get("anyOf", ())]
        inner = [part["$ref"].rsplit("/", 1)[1] for part in parts if "$ref" in part]
        fields[name] = _names(inner[0], sections) if inner else True
        if inner and {"type": "null"} in parts:
            fields[name]["type"] = ["object", "null"]
    return {"type": "object", "additionalProperties": False, "properties": fields}


def written(text: str) -> str:
    """Return the text of the schema file with both schemas in it."""
    for name, schema in (("policy", policy_schema()), ("config", config_schema())):
        block = json.dumps(schema, indent=2).replace("\n", "\n    ")
        old = re.compile(rf'^    "{name}": \{{$.*?^    \}},$', re.DOTALL | re.MULTILINE)
        text = old.sub(lambda _, new=f'    "{name}": {block},': new, text, count=1)  # type: ignore[misc]  # no type for such a lambda
    return text


def _converted(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a schema from OpenAPI 3.0, which CRDs use, to JSON schema."""
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
