"""The rules of the picker's Role: as few permissions as the requests of the picker need."""

from tests.harness.role import rules


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
