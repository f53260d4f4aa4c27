"""The status of InferenceModelRewrites: accepted, refused with a reason, in conflict, or for a pool that
nobody serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from epp.kube.api import Api, ApiError, Query
from epp.kube.objects import Condition, ModelRewrite
from epp.kube.rewrite_status import judge
from epp.kube.rewrite_writing import RewriteWriter
from epp.kube.rewrites import ModelRewrites

OLDER = "inference.networking.x-k8s.io"


def rule(*models: str, target: str = "t", **more: Any) -> dict[str, Any]:
    return {
        "matches": [{"model": {"value": m}} for m in models],
        "targets": [{"modelRewrite": target, **more}],
    }


def rewrite(
    name: str,
    *rules: dict[str, Any],
    pool: str = "vllm",
    generation: int = 1,
    version: str = "1",
    conditions: tuple[Condition, ...] = (),
) -> ModelRewrite:
    document = {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "generation": generation,
            "resourceVersion": version,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"poolRef": {"name": pool}, "rules": rules},
        "status": {"conditions": [msgspec.to_builtins(c) for c in conditions]},
    }
    return msgspec.convert(document, type=ModelRewrite)


def of(*objects: ModelRewrite, group: str = "llm-d.ai") -> ModelRewrites:
    found = ModelRewrites(pools=["vllm"], group=group)
    found.replace(objects)
    found.check_integrity()
    return found


def said(*sets: ModelRewrites, existing: Sequence[str] = ("vllm",)) -> dict[str, str]:
    """Return reason and message by name."""
    words = judge(sets, existing=existing)
    assert all(word.so == (word.reason == "Accepted") for word in words.values())
    return {name: f"{word.reason}: {word.message}" for (_, name), word in words.items()}


def test_a_sound_object_is_accepted_and_one_for_a_pool_that_is_not_there_is_told_so() -> None:
    sound = of(rewrite("a", rule("gpt"), rule()))
    assert said(sound) == {"a": "Accepted: its rules are in use"}
    assert said(sound, existing=())["a"].startswith("TargetNotFound: no InferencePool")


def test_of_several_pools_an_object_is_told_of_its_own_pool_and_that_it_may_not_take_every_other_name() -> (
    None
):
    found = ModelRewrites(pools=["vllm", "b"], group="llm-d.ai")
    found.replace(
        [rewrite("a", rule("gpt")), rewrite("x", rule("old"), pool="b"), rewrite("all", rule(), pool="b")]
    )
    words = said(found, existing=["vllm"])
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
def test_an_object_that_cannot_be_used_as_written_says_which_rule_and_why(
    bad: dict[str, Any], why: str
) -> None:
    found = of(rewrite("a", rule("gpt"), bad))
    assert f"Invalid: spec.rules{why}" in said(found)["a"]
    assert found.rules()[0].models == ("gpt",), "its other rules count"


def test_an_object_without_rules_is_told_so() -> None:
    assert said(of(rewrite("a"))) == {"a": "Invalid: spec.rules is empty"}


def test_of_two_objects_for_one_name_the_younger_is_told_who_has_it() -> None:
    both = of(
        rewrite("a", rule("gpt"), rule()), rewrite("b", rule("gpt", "new"), rule()), rewrite("c", rule("x"))
    )
    words = said(both)
    assert words["a"].startswith("Accepted")
    assert words["c"].startswith("Accepted")
    assert words["b"] == (
        "Conflicted: model gpt is in the older rewrite a; a rule for all other models is in the older rewrite a; "
        "the other names of this rewrite count"
    )


def test_a_name_twice_in_one_object_is_no_conflict_and_the_newer_group_goes_first() -> None:
    twice = of(rewrite("a", rule("gpt", target="one"), rule("gpt", target="two")))
    assert said(twice)["a"].startswith("Accepted")
    older = of(rewrite("b", rule("gpt")), group=OLDER)
    assert "model gpt is in the older rewrite a of llm-d.ai" in said(twice, older)["b"]


def test_a_change_of_status_alone_is_no_change_of_what_is_wanted() -> None:
    found = of(rewrite("a", rule("gpt")))
    version = found.version
    found.put(rewrite("a", rule("gpt"), version="2", conditions=(Condition("Accepted", "True"),)))
    assert (found.version, found.claims()[0].resource_version) == (version, "2")
    found.put(rewrite("a", rule("other"), generation=2, version="3"))
    assert found.version > version
    found.put(rewrite("a", rule("other"), generation=3, version="4", pool="another"))
    assert (found.claims(), [claim.name for claim in found.of_other_pools()]) == ([], ["a"])


class StatusServer(Api):
    """Applies merge patches to one object after the other."""

    def __init__(self, *, answers: int = 200) -> None:
        super().__init__(None)
        self.wrote: list[tuple[str, Any]] = []
        self._answers = answers

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Query = (),
        body: Any = None,
    ) -> bytes:
        self.wrote.append((f"{method} {path.rpartition('/ns/')[2]}", body))
        if self._answers != 200:
            raise ApiError("no", status=self._answers)
        name = path.split("/")[-2]
        metadata = {"name": name, "uid": f"uid-{name}", "generation": 1, "resourceVersion": "9"}
        return msgspec.json.encode({"metadata": metadata, "status": body["status"]})


async def look(
    server: StatusServer, found: ModelRewrites, *times: float, holds: bool = True
) -> list[tuple[str, Any]]:
    """Return what is written in looks at these times."""
    writer = RewriteWriter(server, [found], namespace="ns", time_text=lambda: "T")
    for now in times:
        await writer.look(existing=["vllm"], holds=lambda: holds, now=now)
    return server.wrote


def condition(status: str, reason: str, **more: Any) -> Condition:
    return Condition(type="Accepted", status=status, reason=reason, **more)


async def test_the_holder_writes_once_what_an_object_does_not_say_and_keeps_the_conditions_of_others() -> (
    None
):
    other = Condition(type="Seen", status="True", reason="R", last_transition_time="before")
    wrote = await look(StatusServer(), of(rewrite("a", rule("gpt"), conditions=(other,))), 1.0, 2.0, 30.0)
    ((where, body),) = wrote
    assert where == "PATCH inferencemodelrewrites/a/status"
    assert body["metadata"] == {"uid": "uid-a", "resourceVersion": "1"}
    assert [(c["type"], c["status"], c["reason"]) for c in body["status"]["conditions"]] == [
        ("Seen", "True", "R"),
        ("Accepted", "True", "Accepted"),
    ]


async def test_who_does_not_hold_the_lease_writes_nothing() -> None:
    assert await look(StatusServer(), of(rewrite("a", rule("gpt"))), 1.0, holds=False) == []


async def test_the_time_of_a_condition_is_that_of_its_last_change() -> None:
    before = condition("True", "Accepted", last_transition_time="before")
    wrote = await look(StatusServer(), of(rewrite("a", rule("gpt"), conditions=(before,))), 1.0)
    assert wrote[0][1]["status"]["conditions"][0]["lastTransitionTime"] == "before"


@pytest.mark.parametrize("answers", [404, 409, 500])
async def test_a_write_that_fails_is_tried_again_after_a_while(answers: int) -> None:
    wrote = await look(StatusServer(answers=answers), of(rewrite("a", rule("gpt"))), 1.0, 2.0, 5.0, 12.0)
    assert len(wrote) == 2


async def test_an_object_for_a_pool_that_nobody_serves_says_so_after_a_while_and_a_judged_one_is_left_alone() -> (
    None
):
    pending = condition("Unknown", "Pending")
    judged = condition("True", "Accepted", observed_generation=1)
    left = condition("True", "Accepted", observed_generation=1, message="for the pool that it had before")
    found = of(
        rewrite("typo", rule("gpt"), pool="vlm", conditions=(pending,)),
        rewrite("theirs", rule("gpt"), pool="other", conditions=(judged,)),
        rewrite("moved", rule("gpt"), pool="other", generation=2, conditions=(left,)),
    )
    assert await look(StatusServer(), found, 1.0, 15.0) == []
    wrote = await look(StatusServer(), found, 1.0, 22.0)
    assert [where for where, _ in wrote] == [
        f"PATCH inferencemodelrewrites/{name}/status" for name in ("typo", "moved")
    ]
    (said_now,) = wrote[0][1]["status"]["conditions"]
    assert (said_now["status"], said_now["reason"]) == ("Unknown", "TargetNotFound")
    assert "for InferencePool vlm" in said_now["message"]
