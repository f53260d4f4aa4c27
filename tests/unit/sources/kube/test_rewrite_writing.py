"""The requests that write the status of InferenceModelRewrites, and when they are sent."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from epp.sources.kube.api import Api, ApiError, Query
from epp.sources.kube.objects import Condition
from epp.sources.kube.rewrite_writing import RewriteWriter
from epp.sources.kube.rewrites import ModelRewrites
from tests.unit.sources.kube.objects import rewrite, rewrites_of, rule


class StatusServer(Api):
    """Applies the patch of each object's status."""

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
    """Let the writer look at these times. Return its requests."""
    writer = RewriteWriter(server, [found], namespace="ns", time_text=lambda: "T")
    for now in times:
        await writer.look(existing=["vllm"], served=None, holds=lambda: holds, now=now)
    return server.wrote


def condition(status: str, reason: str, **more: Any) -> Condition:
    return Condition(type="Accepted", status=status, reason=reason, **more)


async def test_the_holder_writes_a_missing_condition_once() -> None:
    other = Condition(type="Seen", status="True", reason="R", last_transition_time="before")
    wrote = await look(
        StatusServer(), rewrites_of(rewrite("a", rule("gpt"), conditions=(other,))), 1.0, 2.0, 30.0
    )
    ((where, body),) = wrote
    assert where == "PATCH inferencemodelrewrites/a/status"
    assert body["metadata"] == {"uid": "uid-a", "resourceVersion": "1"}
    assert [(c["type"], c["status"], c["reason"]) for c in body["status"]["conditions"]] == [
        ("Seen", "True", "R"),
        ("Accepted", "True", "Accepted"),
    ]


async def test_a_picker_without_the_lease_writes_nothing() -> None:
    assert await look(StatusServer(), rewrites_of(rewrite("a", rule("gpt"))), 1.0, holds=False) == []


async def test_the_time_of_a_condition_is_that_of_its_last_change() -> None:
    before = condition("True", "Accepted", last_transition_time="before")
    wrote = await look(StatusServer(), rewrites_of(rewrite("a", rule("gpt"), conditions=(before,))), 1.0)
    assert wrote[0][1]["status"]["conditions"][0]["lastTransitionTime"] == "before"


@pytest.mark.parametrize("answers", [404, 409, 500])
async def test_a_write_that_fails_is_tried_again_after_a_while(answers: int) -> None:
    wrote = await look(
        StatusServer(answers=answers), rewrites_of(rewrite("a", rule("gpt"))), 1.0, 2.0, 5.0, 12.0
    )
    assert len(wrote) == 2


async def test_an_object_for_a_pool_without_a_picker_is_marked() -> None:
    pending = condition("Unknown", "Pending")
    judged = condition("True", "Accepted", observed_generation=1)
    left = condition("True", "Accepted", observed_generation=1, message="for the pool that it had before")
    found = rewrites_of(
        rewrite("typo", rule("gpt"), pool="vlm", conditions=(pending,)),
        rewrite("theirs", rule("gpt"), pool="other", conditions=(judged,)),
        rewrite("moved", rule("gpt"), pool="other", generation=2, conditions=(left,)),
    )
    assert await look(StatusServer(), found, 1.0, 3.0) == []
    wrote = await look(StatusServer(), found, 1.0, 4.5)
    assert [where for where, _ in wrote] == [
        f"PATCH inferencemodelrewrites/{name}/status" for name in ("typo", "moved")
    ]
    (said_now,) = wrote[0][1]["status"]["conditions"]
    assert (said_now["status"], said_now["reason"]) == ("Unknown", "TargetNotFound")
    assert "for InferencePool vlm" in said_now["message"]


async def test_the_rest_of_many_objects_is_written_at_the_next_look() -> None:
    many = rewrites_of(*(rewrite(f"r{n:02}", rule(f"m{n}")) for n in range(30)))
    assert len(await look(StatusServer(), many, 1.0)) == 20
    assert (
        len(
            await look(
                StatusServer(),
                rewrites_of(*(rewrite(f"r{n:02}", rule(f"m{n}")) for n in range(30))),
                1.0,
                2.0,
            )
        )
        == 30
    )


async def test_a_refused_write_is_logged_once_and_a_conflict_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await look(StatusServer(answers=409), rewrites_of(rewrite("a", rule("gpt"))), 1.0)
    assert not caplog.records
    await look(StatusServer(answers=500), rewrites_of(rewrite("a", rule("gpt"))), 1.0, 12.0, 23.0)
    assert [r.getMessage() for r in caplog.records] == [
        "cannot write the status of rewrite a and will try again: no"
    ]
