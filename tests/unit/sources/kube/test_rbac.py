"""The rules of the picker's Role: as few permissions as the requests of the picker need."""

from __future__ import annotations

import yaml

from epp.sources.kube.rbac import POOL, RULES, rules, rules_yaml


def test_placeholders_are_replaced_by_names_of_the_installation() -> None:
    named = {
        rule["resources"][0]: rule["resourceNames"]
        for rule in rules(pools=["a", "b"])
        if "resourceNames" in rule
    }
    assert named == {"inferencepools": ["a", "b"]}


def test_the_picker_may_change_only_status() -> None:
    for rule in rules():
        assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])
        changes = set(rule["verbs"]) - {"get", "list", "watch"}
        (resource,) = rule["resources"]
        assert not changes or resource.endswith("/status"), resource
        assert "delete" not in rule["verbs"]


def test_the_file_of_the_chart_holds_each_rule_below_its_reason() -> None:
    text = rules_yaml()
    assert yaml.safe_load(text) == rules()
    assert POOL in text
    for rule in RULES:
        assert f"# {rule.why}\n- apiGroups:" in text
