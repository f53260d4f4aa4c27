"""InferenceModelRewrites and InferenceObjectives: which of them count, what they result in, their status."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pytest

from epp.base.types import ApiKind, InferenceRequest
from epp.config.sections import LlmdGroup
from epp.request.rewriting import Rewrites
from epp.sources.kube.llmd import (
    GROUPS,
    ModelRewrites,
    Objectives,
    all_rewrites,
    judge_objectives,
    judge_rewrites,
    merged,
    objectives_in,
    rewrites_in,
)
from epp.sources.kube.objects import Condition, ModelRewrite, Objective
from epp.sources.kube.statuses import Wanted
from tests.harness.role import rules
from tests.invariants.kube import check_collection
from tests.unit.sources.kube.objects import rewrite, rewrites_of, rule

NEWER: LlmdGroup = "llm-d.ai"
OLDER: LlmdGroup = "inference.networking.x-k8s.io"


def outcomes(wanted: Iterable[Wanted]) -> dict[str, str]:
    """Return reason and message of each status by name."""
    words = {}
    for each in wanted:
        (word,) = each.status.conditions
        assert (word.type, word.status) == ("Accepted", str(word.reason == "Accepted"))
        words[each.claim.name] = f"{word.reason}: {word.message}"
    return words


def exact(value: str) -> dict[str, Any]:
    return {"model": {"type": "Exact", "value": value}}


def weighted_rule(*models: str, **weights: int | None) -> dict[str, Any]:
    targets = [
        {"modelRewrite": name} | ({} if weight is None else {"weight": weight})
        for name, weight in weights.items()
    ]
    return {"matches": [exact(model) for model in models], "targets": targets}


def dated_rewrite(
    name: str,
    *rewrite_rules: dict[str, Any],
    pool: str = "vllm",
    created: str = "2026-01-01T00:00:00Z",
    generation: int = 1,
) -> ModelRewrite:
    spec = {"poolRef": {"group": "inference.networking.k8s.io", "name": pool}, "rules": rewrite_rules}
    return msgspec.convert(
        {"metadata": {"name": name, "creationTimestamp": created, "generation": generation}, "spec": spec},
        type=ModelRewrite,
    )


def target_of(rewrites: Rewrites, model: str, *, request_id: str = "r") -> str:
    inference = InferenceRequest(kind=ApiKind.OTHER, model=model)
    return rewrites.target(inference, session="", request_id=request_id)


def test_the_oldest_object_counts_and_an_exact_name_goes_first() -> None:
    found = rewrites_of(
        dated_rewrite("b", weighted_rule("gpt", younger=None), created="2026-01-02T00:00:00Z"),
        dated_rewrite("c", weighted_rule(fallback=None), created="2025-01-01T00:00:00Z"),
        dated_rewrite("a", weighted_rule("gpt", older=None)),
        dated_rewrite("d", weighted_rule("gpt", strange=None), pool="other", created="2024-01-01T00:00:00Z"),
    )
    assert target_of(all_rewrites([found]), "gpt") == "older"
    assert target_of(all_rewrites([found]), "whatever") == "fallback"
    found.remove("a")
    found.put(dated_rewrite("c", weighted_rule("x", y=None), generation=2))
    assert target_of(all_rewrites([found]), "gpt") == "younger"
    assert target_of(all_rewrites([found]), "whatever") == "whatever"


def test_with_several_pools_a_rule_for_all_other_names_does_not_count() -> None:
    (found,) = rewrites_in(["llm-d.ai"], pools=["vllm", "other"])
    found.replace(
        [
            dated_rewrite("a", weighted_rule(fallback=None), weighted_rule("gpt", llama=None)),
            dated_rewrite("b", weighted_rule("old", mistral=None), pool="other"),
        ]
    )
    rewrites = all_rewrites([found])
    assert [target_of(rewrites, name) for name in ("gpt", "old", "mistral")] == [
        "llama",
        "mistral",
        "mistral",
    ]


def test_weights_are_those_of_the_object_and_missing_weight_counts_as_one() -> None:
    found = all_rewrites(
        [
            rewrites_of(
                dated_rewrite(
                    "a", weighted_rule("gpt", stable=90, canary=10), weighted_rule("even", one=None, two=None)
                )
            )
        ]
    )
    canary = sum(target_of(found, "gpt", request_id=str(n)) == "canary" for n in range(2000))
    even = sum(target_of(found, "even", request_id=str(n)) == "two" for n in range(2000))
    # Four standard deviations: 54 and 90.
    assert abs(canary - 200) < 54
    assert abs(even - 1000) < 90


def test_a_rule_without_a_target_or_a_match_is_ignored() -> None:
    empty = {"matches": [exact("")], "targets": [{"modelRewrite": "t"}]}
    nameless = {"matches": [], "targets": [{"modelRewrite": ""}, {"modelRewrite": "t" * 2000}]}
    assert not all_rewrites([rewrites_of(dated_rewrite("a", empty, nameless, {"targets": []}))])


def test_the_newer_group_counts_first() -> None:
    newer, older = (
        rewrites_of(dated_rewrite("z", weighted_rule("gpt", new=None))),
        rewrites_of(dated_rewrite("a", weighted_rule("gpt", old=None))),
    )
    assert target_of(all_rewrites([newer, older]), "gpt") == "new"


def test_names_that_no_request_can_have_are_left_out() -> None:
    """Each name is an entry of an index that changes build again, and of the answer to `GET /v1/models`."""
    long = dated_rewrite("long", weighted_rule("x" * 1025, y=None), created="2025-01-01T00:00:00Z")
    many = [
        dated_rewrite(
            f"r{n:03}",
            weighted_rule(*(f"{n}-{i}" for i in range(1000)), y=None),
            created="2026-01-01T00:00:00Z",
        )
        for n in range(40)
    ]
    found = rewrites_of(long, *many)
    rewrites = all_rewrites([found])
    assert all(len(name) < 10 for name in rewrites.aliases)
    assert 15_000 < len(rewrites.aliases) <= 16_384
    assert target_of(rewrites, "0-7") == "y"
    assert target_of(rewrites, "39-7") == "39-7"
    assert statuses(found)["r039"].startswith("Invalid: more than 16384 names in all rewrites; ")


def statuses(
    *sets: ModelRewrites, existing: Sequence[str] = ("vllm",), served: frozenset[str] | None = None
) -> dict[str, str]:
    return outcomes(judge_rewrites(sets, existing=existing, served=served))


def test_a_sound_object_is_accepted_and_a_missing_pool_is_reported() -> None:
    sound = rewrites_of(rewrite("a", rule("gpt"), rule()))
    assert statuses(sound) == {"a": "Accepted: its rules are in use"}
    assert statuses(sound, existing=())["a"].startswith("TargetNotFound: no InferencePool")


def test_a_rewrite_to_a_model_that_nobody_serves_is_not_in_use() -> None:
    found = rewrites_of(rewrite("a", rule("gpt", target="gone")), rewrite("b", rule("old", target="here")))
    words = statuses(found, served=frozenset({"here"}))
    assert words["a"] == "ModelNotServed: no server lists gone, so requests that go there get 404"
    assert words["b"].startswith("Accepted")
    assert statuses(found, served=None)["a"].startswith("Accepted"), "the lists are not known yet"


def test_with_several_pools_a_status_is_about_its_own_pool() -> None:
    (found,) = rewrites_in(["llm-d.ai"], pools=["vllm", "b"])
    found.replace(
        [rewrite("a", rule("gpt")), rewrite("x", rule("old"), pool="b"), rewrite("all", rule(), pool="b")]
    )
    words = statuses(found, existing=["vllm"])
    assert [words[name].split(":")[0] for name in ("a", "x", "all")] == [
        "Accepted",
        "TargetNotFound",
        "Invalid",
    ]
    assert "the picker has several pools; name the models" in words["all"]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (
            {"matches": [{"model": {"value": "m"}}], "targets": []},
            "[1].targets: 0 of 0 have a modelRewrite of 1 to 1024",
        ),
        (rule("m", target="t" * 2000), "[1].targets: 0 of 1 have a modelRewrite of 1 to 1024"),
        (rule("m", ""), "[1].matches: only 1 of 2 entries name a model"),
        (
            {"targets": [{"modelRewrite": "a"}, {"modelRewrite": ""}]},
            "[1].targets: 1 of 2 have a modelRewrite",
        ),
    ],
)
def test_the_status_of_an_invalid_object_says_which_rule_is_wrong_and_why(
    bad: dict[str, Any], why: str
) -> None:
    found = rewrites_of(rewrite("a", rule("gpt"), bad))
    assert f"Invalid: spec.rules{why}" in statuses(found)["a"]
    assert "gpt" in all_rewrites([found]).aliases, "its other rules count"


def test_an_object_without_rules_is_reported_as_invalid() -> None:
    assert statuses(rewrites_of(rewrite("a"))) == {"a": "Invalid: spec.rules is empty"}


def test_the_status_of_the_younger_object_names_the_older() -> None:
    both = rewrites_of(
        rewrite("a", rule("gpt"), rule()), rewrite("b", rule("gpt", "new"), rule()), rewrite("c", rule("x"))
    )
    words = statuses(both)
    assert words["a"].startswith("Accepted")
    assert words["c"].startswith("Accepted")
    assert words["b"] == (
        "Conflicted: model gpt is in the older rewrite a of llm-d.ai; the names that no older rewrite has count"
    )


def test_a_repeated_name_in_one_object_is_no_conflict() -> None:
    twice = rewrites_of(rewrite("a", rule("gpt", target="one"), rule("gpt", target="two")))
    assert statuses(twice)["a"].startswith("Accepted")
    older = rewrites_of(rewrite("b", rule("gpt")), group=OLDER)
    assert "model gpt is in the older rewrite a of llm-d.ai" in statuses(twice, older)["b"]


def test_a_change_of_status_alone_is_not_a_change_of_the_rules() -> None:
    found = rewrites_of(rewrite("a", rule("gpt")))
    assert not found.put(rewrite("a", rule("gpt"), version="2", conditions=(Condition("Accepted", "True"),)))
    assert found.found["a"].metadata.resource_version == "2"
    assert found.put(rewrite("a", rule("other"), generation=2, version="3"))
    assert found.put(rewrite("a", rule("other"), generation=3, version="4", pool="another"))
    assert found.found == {}


def objective(
    name: str, priority: object, *, pool: str = "vllm", generation: int = 1, created: str = ""
) -> Objective:
    spec: dict[str, object] = {"poolRef": {"group": "inference.networking.k8s.io", "name": pool}}
    if priority is not None:
        spec["priority"] = priority
    metadata = {"name": name, "uid": f"uid-{name}", "generation": generation, "creationTimestamp": created}
    return msgspec.convert({"metadata": metadata, "spec": spec}, type=Objective)


def objectives(*found: Objective, group: LlmdGroup = NEWER) -> Objectives:
    (made,) = objectives_in([group], pools=["vllm"])
    made.replace(found)
    check_collection(made)
    return made


def test_objectives_of_the_pool_give_priorities_and_those_of_others_do_not() -> None:
    found = objectives(
        objective("high", 10), objective("unsaid", None), objective("strange", 5, pool="other")
    )
    assert merged([found]) == {"high": 10, "unsaid": 0}
    found.put(objective("high", -5, generation=2))
    found.remove("unsaid")
    assert merged([found]) == {"high": -5}
    found.put(objective("high", 1, pool="other", generation=3))
    assert merged([found]) == {}


@pytest.mark.parametrize(("priority", "taken"), [(2**31 - 1, 1000), (-(2**31), -1000)])
def test_a_priority_is_kept_within_the_bounds_of_the_policy(priority: int, taken: int) -> None:
    assert merged([objectives(objective("far", priority))]) == {"far": taken}


def test_the_newer_group_wins_if_both_have_a_name() -> None:
    newer = objectives(objective("both", 1))
    older = objectives(objective("both", 2), objective("old", 3), group=OLDER)
    assert merged([newer, older]) == {"both": 1, "old": 3}
    reasons = {
        (each.claim.content.group, each.claim.name): each.status.conditions[0].reason
        for each in judge_objectives([newer, older], existing=["vllm"])
    }
    assert reasons == {(NEWER, "both"): "Accepted", (OLDER, "both"): "Conflicted", (OLDER, "old"): "Accepted"}


def test_the_status_of_an_objective_says_its_priority_or_what_is_wrong() -> None:
    found = [objectives(objective("high", 7), objective("strange", 5, pool="other"))]
    assert outcomes(judge_objectives(found, existing=["vllm"])) == {
        "high": "Accepted: requests that name it have priority 7"
    }
    assert outcomes(judge_objectives(found, existing=[]))["high"].startswith("TargetNotFound: ")


def test_the_number_of_objectives_is_bounded_and_the_oldest_count() -> None:
    every = [objective(f"o{n}", n, created=f"2026-01-01T00:{3000 - n}:00Z") for n in range(2000)]
    assert merged([objectives(*every)]).keys() == {f"o{n}" for n in range(2000 - 1024, 2000)}


@pytest.mark.parametrize("kind", ["inferenceobjectives", "inferencemodelrewrites"])
def test_the_role_lets_the_picker_follow_both_groups_and_write_status(kind: str) -> None:
    for resource, allowed in ((kind, ["list", "watch"]), (f"{kind}/status", ["patch"])):
        granted = {r["apiGroups"][0]: r["verbs"] for r in rules() if resource in r["resources"]}
        assert granted == dict.fromkeys(GROUPS, allowed)
