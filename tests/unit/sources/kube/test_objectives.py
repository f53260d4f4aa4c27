"""InferenceObjectives: which of them count, what they result in, and their status."""

from __future__ import annotations

import msgspec
import pytest

from epp.config.kubernetes import LlmdGroup
from epp.sources.kube.claims import GROUPS, Objectives, due, judge_objectives, merged, objectives_in
from epp.sources.kube.objects import Objective
from tests.harness.role import rules

NEWER: LlmdGroup = "llm-d.ai"
OLDER: LlmdGroup = "inference.networking.x-k8s.io"


def objective(name: str, priority: object, *, pool: str = "vllm", generation: int = 1) -> Objective:
    spec: dict[str, object] = {"poolRef": {"group": "inference.networking.k8s.io", "name": pool}}
    if priority is not None:
        spec["priority"] = priority
    metadata = {"name": name, "uid": f"uid-{name}", "generation": generation}
    return msgspec.convert({"metadata": metadata, "spec": spec}, type=Objective)


def objectives(*found: Objective, group: LlmdGroup = NEWER) -> Objectives:
    (made,) = objectives_in([group], pools=["vllm"])
    made.replace(found)
    made.check_integrity()
    return made


def test_objectives_of_the_pool_give_priorities_and_those_of_others_do_not() -> None:
    found = objectives(
        objective("high", 10), objective("unsaid", None), objective("strange", 5, pool="other")
    )
    assert merged([found]) == {"high": 10, "unsaid": 0}
    found.put(objective("high", -5, generation=2))
    found.remove(objective("unsaid", None))
    assert merged([found]) == {"high": -5}
    found.put(objective("high", 1, pool="other", generation=3))
    assert merged([found]) == {}


@pytest.mark.parametrize(("said", "taken"), [(2**31 - 1, 1000), (-(2**31), -1000)])
def test_a_priority_is_kept_within_the_bounds_of_the_policy(said: int, taken: int) -> None:
    assert merged([objectives(objective("far", said))]) == {"far": taken}


def test_the_newer_group_wins_if_both_have_a_name() -> None:
    newer = objectives(objective("both", 1))
    older = objectives(objective("both", 2), objective("old", 3), group=OLDER)
    assert merged([newer, older]) == {"both": 1, "old": 3}
    results = {
        (claim.group, claim.name): result
        for _, claim, result in judge_objectives([newer, older], existing=["vllm"])
    }
    assert results[OLDER, "both"].reason == "Conflicted"
    assert results[NEWER, "both"].so
    assert results[OLDER, "old"].so


def test_the_status_of_an_objective_says_its_priority_or_what_is_wrong() -> None:
    found = objectives(objective("high", 7), objective("strange", 5, pool="other"))

    def said(*existing: str) -> dict[str, str]:
        writes = due(judge_objectives([found], existing=existing), namespace="ns", time_text="T")
        words = {each.path.rpartition("/")[2]: each.patch["status"]["conditions"][0] for each in writes}
        return {name: f"{word['status']} {word['reason']}: {word['message']}" for name, word in words.items()}

    assert said("vllm") == {"high": "True Accepted: requests that name it have priority 7"}
    assert said()["high"].startswith("False TargetNotFound")


def test_the_number_of_objectives_is_bounded() -> None:
    assert len(merged([objectives(*(objective(f"o{n}", n) for n in range(2000)))])) == 1024


def test_the_role_lets_the_picker_follow_both_groups_and_write_status() -> None:
    verbs = {"inferenceobjectives": ["list", "watch"], "inferenceobjectives/status": ["patch"]}
    for resource, allowed in verbs.items():
        granted = {r["apiGroups"][0]: r["verbs"] for r in rules() if resource in r["resources"]}
        assert granted == dict.fromkeys(GROUPS, allowed)
