"""InferenceObjectives: which of them count, and what they result in."""

from __future__ import annotations

import msgspec
import pytest

from epp.sources.kube.objectives import PATHS, Objectives, merged
from epp.sources.kube.objects import Objective
from epp.sources.kube.rbac import rules


def objective(name: str, priority: object, *, pool: str = "vllm") -> Objective:
    spec: dict[str, object] = {"poolRef": {"group": "inference.networking.k8s.io", "name": pool}}
    if priority is not None:
        spec["priority"] = priority
    return msgspec.convert({"metadata": {"name": name}, "spec": spec}, type=Objective)


def test_objectives_of_the_pool_give_priorities_and_those_of_others_do_not() -> None:
    found = Objectives(pools=["vllm"])
    found.replace([objective("high", 10), objective("unsaid", None), objective("strange", 5, pool="other")])
    assert found.priorities == {"high": 10, "unsaid": 0}
    found.put(objective("high", -5))
    found.remove(objective("unsaid", None))
    assert found.priorities == {"high": -5}
    found.put(objective("high", 1, pool="other"))
    assert found.priorities == {}


@pytest.mark.parametrize(("said", "taken"), [(2**31 - 1, 1000), (-(2**31), -1000)])
def test_a_priority_is_kept_within_the_bounds_of_the_policy(said: int, taken: int) -> None:
    found = Objectives(pools=["vllm"])
    found.put(objective("far", said))
    assert found.priorities == {"far": taken}


def test_the_newer_group_wins_if_both_have_a_name() -> None:
    newer, older = Objectives(pools=["vllm"]), Objectives(pools=["vllm"])
    newer.put(objective("both", 1))
    older.put(objective("both", 2))
    older.put(objective("old", 3))
    assert merged([newer, older]) == {"both": 1, "old": 3}


def test_the_number_of_objectives_is_bounded() -> None:
    found = Objectives(pools=["vllm"])
    found.replace(objective(f"o{n}", n) for n in range(2000))
    assert len(found.priorities) == 1024


def test_the_role_lets_the_picker_follow_both_groups() -> None:
    granted = {
        rule["apiGroups"][0]: rule["verbs"] for rule in rules() if "inferenceobjectives" in rule["resources"]
    }
    assert granted == {group: ["list", "watch"] for group in PATHS}
