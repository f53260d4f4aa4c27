"""The CustomResourceDefinition: every field has a description and bounds, and is a field of the structs."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import pytest
import yaml

from epp.config.policy import PolicySpec
from tests.reference.crd import REVISION, crd, crd_yaml


def nodes(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Return every schema within a schema, with its path."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")


@pytest.fixture
def schema() -> Mapping[str, Any]:
    return crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]  # type: ignore[no-any-return]  # JSON values


def ours(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(path, node) for path, node in nodes(schema) if path.startswith((".spec", ".status"))]


def test_the_file_holds_the_object() -> None:
    assert yaml.safe_load(crd_yaml()) == crd()
    assert crd()["metadata"]["labels"]["gateway.networking.k8s.io/policy"] == "Direct", (
        "for Gateway API's tools"
    )


def test_every_field_has_a_description(schema: Mapping[str, Any]) -> None:
    assert [
        path
        for path, node in ours(schema)
        if not path.startswith(".spec.flow.claims[")
        and not node.get("description", "").endswith((".", "never"))
    ] == []


def test_maps_and_lists_state_the_type_of_their_values(schema: Mapping[str, Any]) -> None:
    flow = dict(ours(schema))[".spec.flow"]["properties"]
    for field in ("objectives", "models", "ttlByPriority"):
        assert flow[field]["additionalProperties"]["type"] in ("integer", "number")
        assert flow[field]["maxProperties"] >= 16
    assert flow["claims"]["items"]["enum"] == ["Deadline", "Objective", "Tenant"]


def test_everything_that_can_grow_has_a_bound(schema: Mapping[str, Any]) -> None:
    bounds = {"string": "maxLength", "array": "maxItems", "integer": "minimum", "number": "minimum"}
    loose = [
        path
        for path, node in ours(schema)
        if node["type"] in bounds
        and bounds[node["type"]] not in node
        and not node.keys() & {"enum", "format"}
    ]
    assert loose == []


def test_spec_has_the_fields_and_bounds_of_the_policy_file_and_no_default(schema: Mapping[str, Any]) -> None:
    spec = schema["properties"]["spec"]
    written = msgspec.to_builtins(PolicySpec())
    assert set(spec["properties"]) == set(written)
    assert spec["required"] == ["targetRef"]
    for name, default in written.items():
        if isinstance(default, dict):
            assert set(spec["properties"][name]["properties"]) == set(default)
    assert [path for path, node in nodes(schema) if "default" in node] == [".status"], "the spec has none"
    rate = spec["properties"]["cost"]["properties"]["prefillTokensPerSecond"]
    assert (rate["minimum"], rate["exclusiveMinimum"], rate["maximum"]) == (0, True, 10**7)


def test_a_check_over_several_fields_is_a_rule_of_the_schema(schema: Mapping[str, Any]) -> None:
    rules = {
        path: [rule["rule"] for rule in node["x-kubernetes-validations"]]
        for path, node in nodes(schema)
        if "x-kubernetes-validations" in node
    }
    assert rules == {
        ".spec.chunks": [
            "(has(self.laterSizeBytes) ? self.laterSizeBytes : 1024) >= (has(self.sizeBytes) ? self.sizeBytes : 256)"
        ],
        ".spec.scrape": [
            (
                "(has(self.staleAfterSeconds) ? self.staleAfterSeconds : 5.0) >= "
                "(has(self.intervalSeconds) ? self.intervalSeconds : 0.5)"
            )
        ],
    }


SEEN: Final = {2: "bb858642e200a435"}
"""By revision of the CRD: a digest of what its schema takes."""


def shape(schema: Any) -> Any:
    """Return what a schema takes, without the texts for people."""
    if isinstance(schema, dict):
        texts = {"title"} | ({"description"} if isinstance(schema.get("description"), str) else set())
        return {key: shape(value) for key, value in schema.items() if key not in texts}
    return [shape(each) for each in schema] if isinstance(schema, list) else schema


def test_a_changed_schema_has_a_new_revision() -> None:
    schema = shape(crd()["spec"]["versions"][0]["schema"])
    digest = hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()[:16]
    assert SEEN.get(REVISION) == digest, (
        "raise REVISION once for each release that changes the schema, and write the new digest here"
    )
