"""InferenceModelRewrites: which of them count, in which order, and what they result in."""

from __future__ import annotations

from typing import Any

import msgspec

from epp.base.types import ApiKind, InferenceRequest
from epp.request.rewriting import Rewrites
from epp.sources.kube.objects import ModelRewrite
from epp.sources.kube.rewrites import PATHS, all_rewrites, model_rewrites
from tests.harness.role import rules
from tests.unit.sources.kube.objects import rewrites_of


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
    found.remove(dated_rewrite("a"))
    found.put(dated_rewrite("c", weighted_rule("x", y=None), generation=2))
    assert target_of(all_rewrites([found]), "gpt") == "younger"
    assert target_of(all_rewrites([found]), "whatever") == "whatever"


def test_with_several_pools_a_rule_for_all_other_names_does_not_count() -> None:
    found = model_rewrites(pools=["vllm", "other"], group="llm-d.ai")
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


def test_the_role_lets_the_picker_follow_both_groups_and_write_status() -> None:
    granted = {r["apiGroups"][0]: r["verbs"] for r in rules() if "inferencemodelrewrites" in r["resources"]}
    assert granted == {group: ["list", "watch"] for group in PATHS}
    written = {
        r["apiGroups"][0]: r["verbs"] for r in rules() if "inferencemodelrewrites/status" in r["resources"]
    }
    assert written == {group: ["patch"] for group in PATHS}


def test_names_that_no_request_can_have_are_left_out() -> None:
    """Each name is an entry of an index that every change builds again, and of the answer to `GET
    /v1/models`.
    """
    long = dated_rewrite("long", weighted_rule("x" * 1025, y=None), created="2025-01-01T00:00:00Z")
    many = [
        dated_rewrite(
            f"r{n:03}",
            weighted_rule(*(f"{n}-{i}" for i in range(1000)), y=None),
            created="2026-01-01T00:00:00Z",
        )
        for n in range(40)
    ]
    rewrites = all_rewrites([rewrites_of(long, *many)])
    assert all(len(name) < 10 for name in rewrites.aliases)
    assert 15_000 < len(rewrites.aliases) <= 16_384
    assert target_of(rewrites, "0-7") == "y"
    assert target_of(rewrites, "39-7") == "39-7"
