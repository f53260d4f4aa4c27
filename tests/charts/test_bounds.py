"""Each number among the values, at its least, at its most and with a half: the API server accepts the objects
by the real schemas of all providers, and the policy by that of its CRD. The picker accepts its configuration.
"""

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import yaml

from epp.config.policy import load_policy
from epp.config.settings import Config
from tests.charts.rendering import GATEWAY, VALUE_SETS, ValueSet
from tests.cluster_env.control_plane import ControlPlane
from tests.harness.simulated_pool import install_policy_crd
from tests.reference.schema import definitions

pytestmark = pytest.mark.cluster

SMALLEST: Final = 0.001
"""What the least number above an open bound has more."""
BOUNDS: Final = ("least", "most", "half")


def number(schema: Mapping[str, Any], bound: str) -> float | None:
    """Return the number at this bound. None: the schema has none."""
    parts = [schema, *schema.get("anyOf", ())]
    found = {key: value for part in reversed(parts) for key, value in part.items()}
    above = found.get("exclusiveMinimum")
    least = found.get("minimum", None if above is None else above + SMALLEST)
    if bound == "half":
        return None if found.get("type") != "number" else (least or 0) // 1 + 0.5
    return least if bound == "least" else found.get("maximum")


def numbers(schema: Mapping[str, Any], bound: str) -> dict[str, Any]:
    """Return all numbers of a schema at this bound, in the form of values."""
    found: dict[str, Any] = {}
    for name, field in schema.get("properties", {}).items():
        inner = numbers(field, bound) if isinstance(field, dict) else {}
        at = number(field, bound) if isinstance(field, dict) else None
        if inner or at is not None:
            found[name] = inner or at
    return found


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(deepcopy(values))
    for name, value in over.items():
        before = made.get(name)
        made[name] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return made


def values_at(wanted: ValueSet, bound: str) -> dict[str, Any]:
    schema = json.loads((wanted.chart / "values.schema.json").read_text())
    schema["properties"].pop("config", None)
    at = numbers(schema, bound)
    if wanted.chart == GATEWAY:
        at["config"] = {"envoy": numbers(definitions(Config)["Envoy"], bound)}
    if "claimName" in wanted.values.get("simulated", {}).get("kvStore", {}):
        at.pop("replicas", None)  # the chart accepts one replica only, because they would share the volume
    return merged(wanted.values, at)


@pytest.mark.parametrize("wanted", VALUE_SETS, ids=lambda each: each.name)
@pytest.mark.parametrize("bound", BOUNDS)
def test_numbers_at_their_bounds_are_accepted(
    cluster_with_addons: ControlPlane, namespace: str, wanted: ValueSet, bound: str, tmp_path: Path
) -> None:
    plane, file = cluster_with_addons, tmp_path / "values.yaml"
    install_policy_crd(plane)
    file.write_text(yaml.safe_dump(values_at(wanted, bound)))
    command = ("template", wanted.release, wanted.chart, "--namespace", namespace, "--values", file)
    rendered = plane.helm(*command)
    assert not re.search(r"\de[+]\d", rendered), "a number is written with an exponent"
    strictly = ("apply", "--dry-run=server", "--validate=strict", "--namespace", namespace, "-f", "-")
    assert "warning" not in plane.kubectl(*strictly, stdin=rendered).lower()
    files = {k: v for each in yaml.safe_load_all(rendered) if each for k, v in each.get("data", {}).items()}
    if "config.yaml" in files:
        msgspec.yaml.decode(files["config.yaml"], type=Config)
        load_policy(files["policy.yaml"], source="policy.yaml")
        policy = yaml.safe_load(files["policy.yaml"])
        policy["spec"]["targetRef"] = {"name": "p"}
        plane.kubectl(*strictly, stdin=json.dumps(policy))
