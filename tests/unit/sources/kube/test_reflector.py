"""The reflector through everything that can happen to a watch, with a scripted API server."""

import asyncio
import json
import random
import sys
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from epp.sources.keep import Sources
from epp.sources.kube.api import Api, ApiError, Query
from epp.sources.kube.objects import KubeObject, Pod, PolicyObject
from epp.sources.kube.reflector import Access, Collection, Reflector
from tests.invariants.kube import check_reflector


def raw(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


def event(kind: str, obj: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode()


GONE, BROKEN = (event("ERROR", {"kind": "Status", "code": code, "message": "too old"}) for code in (410, 500))


class ScriptedServer(Api):
    """Plays its script: lists and watches in the order of the requests. At the end of the script it hangs."""

    def __init__(self, *script: object) -> None:
        self.script = list(script)
        self.asked: list[str] = []
        self.done = asyncio.Event()

    def _next(self) -> object:
        if not self.script:
            self.done.set()
            return None
        return self.script.pop(0)

    async def request(self, method: str, path: str, *, query: Query = (), body: object = None) -> bytes:
        self.asked.append("list" + "".join(f" {k}={v}" for k, v in query if k == "continue"))
        step = self._next()
        if isinstance(step, ApiError):
            raise step
        assert isinstance(step, dict), f"the script has {step!r} for a list"
        return json.dumps(step).encode()

    async def watch(self, path: str, *, query: Query, idle_s: float) -> AsyncGenerator[bytes]:
        self.asked.append(f"watch {dict(query)['resourceVersion']}")
        step = self._next()
        if isinstance(step, ApiError):
            raise step
        if step is None:
            await asyncio.get_running_loop().create_future()
        assert isinstance(step, list), f"the script has {step!r} for a watch"
        for line in [b"", *step]:
            if isinstance(line, ApiError):
                raise line
            yield line


def page_of_objects(version: int, *objects: dict[str, Any], more: str = "") -> dict[str, Any]:
    return {"metadata": {"resourceVersion": str(version), "continue": more}, "items": list(objects)}


class Names:
    """Keeps the names of the objects, and counts the calls."""

    def __init__(self, kind: type[KubeObject]) -> None:
        self.collection = Collection("pods", kind, "/pods", read=lambda found, _: found.metadata)
        self.changes = 0
        self.states: list[bool] = []

    @property
    def names(self) -> set[str]:
        return {*self.collection.found}

    def changed(self) -> None:
        self.changes += 1

    def state(self, _: str, answers: bool) -> None:  # noqa: FBT001 - one of the cluster's hooks
        self.states.append(answers)


async def play(*script: object, kind: type[KubeObject] = Pod, most: int = 9) -> tuple[ScriptedServer, Names]:
    """Follow until the script ends."""
    server, names = ScriptedServer(*script), Names(kind)
    names.collection.most = most
    rng = random.Random(1)
    access = Access(server, "n", names.state, Sources(rng=rng).keep, rng, asyncio.TaskGroup())
    reflector = Reflector(access, names.collection, on_change=names.changed)
    task = asyncio.create_task(reflector.run())
    done = asyncio.create_task(server.done.wait())
    finished, _ = await asyncio.wait((task, done), timeout=60, return_when=asyncio.FIRST_COMPLETED)
    if task in finished:
        await task
    assert finished, f"asked only {server.asked}"
    check_reflector(reflector)
    task.cancel()
    return server, names


async def test_the_reflector_lists_and_then_watches_from_the_version_of_the_list() -> None:
    server, names = await play(
        page_of_objects(5, raw("a", 1), raw("b", 2)),
        [event("ADDED", raw("c", 6)), event("MODIFIED", raw("a", 7)), event("DELETED", raw("b", 8))],
    )
    assert server.asked == ["list", "watch 5", "watch 8"]
    assert names.names == {"a", "c"}
    assert names.changes == 4
    assert names.states == [True]
    assert names.collection.listed


async def test_a_long_list_comes_in_pages() -> None:
    server, names = await play(page_of_objects(5, raw("a", 1), more="token"), page_of_objects(5, raw("b", 2)))
    assert server.asked == ["list", "list continue=token", "watch 5"]
    assert names.names == {"a", "b"}
    assert names.changes == 1, "half a list is not handed on"


async def test_a_bookmark_moves_the_version_without_a_change() -> None:
    server, names = await play(page_of_objects(5), [event("BOOKMARK", raw("", 99))])
    assert server.asked[-1] == "watch 99"
    assert names.changes == 1


UNREADABLE_ANSWERS = b"<html>", b"[]", b'{"type": 1}', b"\xff", b"[" * 100_000


@pytest.mark.parametrize(
    "watch", [[GONE], ApiError("expired", status=410), *([line] for line in (BROKEN, *UNREADABLE_ANSWERS))]
)
async def test_objects_are_listed_again_if_a_watch_cannot_continue(watch: object) -> None:
    server, names = await play(page_of_objects(5, raw("a", 1)), watch, page_of_objects(9, raw("b", 8)))
    assert server.asked == ["list", "watch 5", "list", "watch 9"]
    assert names.names == {"b"}
    too_old = isinstance(watch, ApiError) or watch == [GONE]
    assert names.states == ([True] if too_old else [True, False, True]), "too old is no fault"


UNREADABLE = {"metadata": {"name": 5, "resourceVersion": "6"}}


async def test_an_unreadable_object_does_not_keep_others_out(caplog: pytest.LogCaptureFixture) -> None:
    server, names = await play(
        page_of_objects(5, raw("a", 1), UNREADABLE, raw("b", 2)),
        [event("MODIFIED", UNREADABLE)],
        page_of_objects(9, raw("a", 1), UNREADABLE, raw("c", 8)),
    )
    assert server.asked == ["list", "watch 5", "list", "watch 9"]
    assert names.names == {"a", "c"}
    assert names.states == [True]
    assert names.collection.listed
    lines = [r.getMessage() for r in caplog.records if "does not count" in r.getMessage()]
    assert len(lines) == 1, "the error is logged once and not at every list"


async def test_an_object_with_an_unreadable_status_still_counts(caplog: pytest.LogCaptureFixture) -> None:
    odd = raw("a", 1) | {"status": {"conditions": "Ready"}}
    server, names = await play(page_of_objects(5, odd), [event("ADDED", odd | raw("b", 6))])
    assert server.asked == ["list", "watch 5", "watch 6"], "the picker does not ask for the list again"
    assert names.names == {"a", "b"}
    lines = [r.getMessage() for r in caplog.records if "does not count" in r.getMessage()]
    assert len(lines) == 1, "the error is logged once and not for every object"
    assert lines[0].startswith("the status of one of the pods cannot be read")


async def test_if_no_object_can_be_read_the_last_known_objects_stay() -> None:
    _, names = await play(
        page_of_objects(5, raw("a", 1)),
        [event("MODIFIED", UNREADABLE)],
        page_of_objects(9, UNREADABLE),
        page_of_objects(9),
    )
    assert names.states == [True, False, True]
    assert names.changes == 2, "the first list and the last"


async def test_an_object_that_would_take_long_to_decode_is_not_decoded() -> None:
    costly = {**raw("a", 1), "status": {"lastAccepted": {"spec": {"x": [0] * 200_000}}}}
    _, names = await play(page_of_objects(5, costly, raw("b", 2)), kind=PolicyObject)
    assert names.names == {"b"}
    _, names = await play(page_of_objects(5, costly, raw("b", 2)))
    assert names.names == {"a", "b"}, "a kind that is read by its fields skips the rest at once"


@pytest.mark.parametrize("last", [GONE, b"<html>"], ids=["too old", "unreadable"])
async def test_watch_left_early_is_closed_and_not_left_to_the_garbage_collector(last: bytes) -> None:
    usual = sys.get_asyncgen_hooks()
    left: list[object] = []
    sys.set_asyncgen_hooks(finalizer=left.append)
    try:
        server, _ = await play(
            page_of_objects(5), [last, event("ADDED", raw("never read", 6))], page_of_objects(9)
        )
    finally:
        sys.set_asyncgen_hooks(*usual)
    assert server.asked[-1] == "watch 9"
    assert left == []


async def test_an_object_that_had_no_room_counts_when_there_is_room() -> None:
    server, names = await play(
        page_of_objects(5, raw("a", 1), raw("b", 2)),
        [event("ADDED", raw("c", 6)), event("DELETED", raw("a", 7))],
        page_of_objects(7, raw("b", 2), raw("c", 6)),
        most=2,
    )
    assert server.asked == ["list", "watch 5", "list", "watch 7"]
    assert names.names == {"b", "c"}


async def test_an_unreachable_api_server_is_asked_again_and_known_objects_stay() -> None:
    server, names = await play(
        page_of_objects(5, raw("a", 1)),
        [event("ADDED", raw("b", 6)), ApiError("reset")],
        ApiError("refused"),
        [event("ADDED", raw("c", 7))],
    )
    assert server.asked == ["list", "watch 5", "watch 6", "watch 6", "watch 7"]
    assert names.names == {"a", "b", "c"}
    assert names.states == [True, False, True]


async def test_before_the_first_list_nothing_is_known() -> None:
    server, names = await play(ApiError("refused"), ApiError("forbidden", status=403), page_of_objects(5))
    assert server.asked == ["list", "list", "list", "watch 5"]
    assert names.states == [False, False, True]


async def test_an_expired_list_token_starts_the_list_again() -> None:
    server, names = await play(
        page_of_objects(5, raw("a", 1), more="token"),
        ApiError("expired", status=410),
        page_of_objects(9, raw("b", 1)),
    )
    assert server.asked == ["list", "list continue=token", "list", "watch 9"]
    assert names.names == {"b"}


@pytest.mark.parametrize(
    ("status", "advice"),
    [(401, "credentials"), (403, "picker-rules.yaml"), (404, "CustomResourceDefinition")],
)
async def test_the_advice_for_the_operator_is_logged_once(
    status: int, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    await play(ApiError("no", status=status), ApiError("no", status=status), page_of_objects(5))
    complaints = [r.getMessage() for r in caplog.records if "cannot watch" in r.getMessage()]
    assert len(complaints) == 1
    assert advice in complaints[0]
