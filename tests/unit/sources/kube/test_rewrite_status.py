"""The status of InferenceModelRewrites: accepted, refused with a reason, in conflict, or for a pool that
nobody serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from epp.sources.kube.objects import Condition
from epp.sources.kube.rewrite_status import judge
from epp.sources.kube.rewrites import ModelRewrites, model_rewrites, rules_of
from tests.unit.sources.kube.objects import rewrite, rewrites_of, rule

OLDER = "inference.networking.x-k8s.io"


def statuses(
    *sets: ModelRewrites, existing: Sequence[str] = ("vllm",), served: frozenset[str] | None = None
) -> dict[str, str]:
    """Return reason and message by name."""
    words = judge(sets, existing=existing, served=served)
    assert all(word.so == (word.reason == "Accepted") for word in words.values())
    return {name: f"{word.reason}: {word.message}" for (_, name), word in words.items()}


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
    found = model_rewrites(pools=["vllm", "b"], group="llm-d.ai")
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
            "[1].targets: no modelRewrite of 1 to 1024",
        ),
        (rule("m", target="t" * 2000), "[1].targets: no modelRewrite of 1 to 1024"),
        (rule("m", ""), "[1].matches: only 1 of 2 entries name a model"),
        (
            {"targets": [{"modelRewrite": "a", "weight": 1}, {"modelRewrite": "b"}]},
            "[1].targets: some have a weight and some have none",
        ),
        (
            {"targets": [{"modelRewrite": "a"}, {"modelRewrite": ""}]},
            "[1].targets: only 1 of 2 have a modelRewrite",
        ),
    ],
)
def test_the_status_of_an_invalid_object_says_which_rule_is_wrong_and_why(
    bad: dict[str, Any], why: str
) -> None:
    found = rewrites_of(rewrite("a", rule("gpt"), bad))
    assert f"Invalid: spec.rules{why}" in statuses(found)["a"]
    assert rules_of(found)[0].models == ("gpt",), "its other rules count"


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
        "Conflicted: model gpt is in the older rewrite a; a rule for all other models is in the older rewrite a; "
        "the other names of this rewrite count"
    )


def test_a_repeated_name_in_one_object_is_no_conflict() -> None:
    twice = rewrites_of(rewrite("a", rule("gpt", target="one"), rule("gpt", target="two")))
    assert statuses(twice)["a"].startswith("Accepted")
    older = rewrites_of(rewrite("b", rule("gpt")), group=OLDER)
    assert "model gpt is in the older rewrite a of llm-d.ai" in statuses(twice, older)["b"]


def test_a_change_of_status_alone_is_not_a_change_of_the_rules() -> None:
    found = rewrites_of(rewrite("a", rule("gpt")))
    version = found.version
    found.put(rewrite("a", rule("gpt"), version="2", conditions=(Condition("Accepted", "True"),)))
    assert (found.version, found.claims()[0].resource_version) == (version, "2")
    found.put(rewrite("a", rule("other"), generation=2, version="3"))
    assert found.version > version
    found.put(rewrite("a", rule("other"), generation=3, version="4", pool="another"))
    assert (found.claims(), [claim.name for claim in found.of_other_pools()]) == ([], ["a"])
