"""A mistake in a YAML file gives one line, which names the place and what was probably meant."""

import re
from pathlib import Path

import pytest

from epp.base.errors import ConfigError
from epp.config.policy import load_policy
from epp.config.settings import load_config
from epp.sources.files.endpoints_file import load_endpoints

HEAD = "apiVersion: prefix-gateway.dev/v1alpha1\nkind: PrefixRoutingPolicy\nmetadata: {name: d}\n"


def error_of_config(text: str, folder: Path) -> str:
    file = folder / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    return str(refused.value).removeprefix(f"{file}: ")


def error_of_policy(text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_policy(text, source="policy.yaml")
    return str(refused.value).removeprefix("policy.yaml: ")


def error_of_endpoints(text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_endpoints(text, source="endpoints.yaml")
    return str(refused.value).removeprefix("endpoints.yaml: ")


def test_unknown_field_without_a_similar_one_gets_the_list_of_all_fields(tmp_path: Path) -> None:
    message = error_of_config("{endpointsFile: e, log: {zzz: 1}}", tmp_path)
    assert message == "line 1: log: unknown field `zzz`; fields are level, format"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "spec: {targetRef: {}}", "line 4: spec.targetRef: there is no `name`$"),
        (
            HEAD + "spec: {flow: {ttlByPriority: {-10: 6}}}",
            "4: spec.flow.ttlByPriority: .* as each name, found",
        ),
        (HEAD[: HEAD.index("kind")], "there is no `kind`; it needs apiVersion, kind, metadata"),
    ],
)
def test_a_mistake_in_a_policy_gets_its_message(text: str, message: str) -> None:
    assert re.search(message, error_of_policy(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{flow: {ttlSeconds: 30s}}", "write a number, without quotes and without a unit"),
        ("{load: {maxWaiting: '64'}}", "write a number, without quotes and without a unit"),
        ("{failures: {probe: 'no'}}", "write true or false, without quotes"),
        ("{sessionHeader: 5}", "put it in quotes"),
        ("{flow: {claims: Tenant}}", "write a list, such as [a, b]"),
        ("{flow: {claims: [Tenant, Who]}}", "values are Deadline, Objective, Tenant"),
        ("{rule: off}", "values are affinity, "),
    ],
)
def test_the_error_for_a_value_of_the_wrong_type_says_what_the_field_takes(text: str, message: str) -> None:
    assert error_of_policy(f"{HEAD}spec: {text}").partition("; ")[2].startswith(message)


def test_equal_keys_in_different_maps_and_in_merged_maps_are_accepted() -> None:
    text = (
        "x: &one {zone: eu}\ny: &two {rack: r1}\nendpoints:\n"
        "  - {name: a, address: '10.0.0.1:80', labels: {zone: eu, ? [1, 2] : name}}\n"
        "  - {name: b, address: '10.0.0.2:80', labels: {<<: *one, <<: *two}}\n"
    )
    assert "twice" not in error_of_endpoints(text)


def test_aliases_that_make_very_many_values_of_a_short_text_are_refused() -> None:
    keys = ", ".join(f"k{n}: 0" for n in range(2000))
    text = f"a: &a {{{keys}}}\nb: {{{', '.join(['<<: *a'] * 400)}}}\nendpoints: []\n"
    assert "too many values" in error_of_endpoints(text)


def test_a_removed_field_is_named_as_removed_only_where_it_stood(tmp_path: Path) -> None:
    removed = "`snapshotIntervalSeconds` was removed; delete it"
    assert removed in error_of_config("{endpointsFile: e, sharing: {snapshotIntervalSeconds: 2}}", tmp_path)
    assert "`paths` was removed" in error_of_policy(HEAD + "spec: {flow: {paths: {}}}")
    for name in ("paths", "status"):
        assert f"unknown field `{name}`" in error_of_config(f"{{endpointsFile: e, {name}: {{}}}}", tmp_path)


@pytest.mark.parametrize("text", ["{", "[1", "a: b: c", "\tx: 1", "endpoints: [{name: a"])
def test_every_message_is_one_line(tmp_path: Path, text: str) -> None:
    for message in (error_of_config(text, tmp_path), error_of_policy(text), error_of_endpoints(text)):
        assert "\n" not in message
        assert "byte string" not in message
