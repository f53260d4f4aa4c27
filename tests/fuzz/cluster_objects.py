"""Input from the API server."""

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from epp.base.types import ApiKind, InferenceRequest
from epp.request.client_names import MAX_NAME_CHARS
from epp.sources.keep import Sources
from epp.sources.kube.api import Api, Query
from epp.sources.kube.llmd import all_rewrites, judge_rewrites, merged, objectives_in, rewrites_in
from epp.sources.kube.objects import (
    Objective,
    ObjectiveSpec,
    ObjectMeta,
    Pool,
    PoolRef,
)
from epp.sources.kube.policies import PolicySet
from epp.sources.kube.pools import pods_of, pool_ports, united
from epp.sources.kube.reflector import Access, Collection, Reflector
from epp.sources.kube.statuses import StatusWriter
from tests.fuzz.behind import SMALL, one_pick, small_picker
from tests.fuzz.trees import as_json
from tests.invariants.kube import check_collection, check_policies, check_reflector
from tests.unit.sources.kube.objects import pod, policy, pool
from tests.unit.sources.kube.test_llmd import dated_rewrite, weighted_rule


class ClusterObjects:
    """Pods, pools, policies, model rewrites and objectives, as lists and as lines of a watch."""

    words: Sequence[bytes] = (
        *b'"metadata": "name":"a" "resourceVersion":"7" "spec": "status": "DELETED"'.split(),
        *b'"ERROR" "code":410'.split(),
        *b'"podIP":"fd00::1" "number":0 "generation":-1 "targetRef": "lastAccepted":'.split(),
        *b'"mode":"DryRun"'.split(),
        *(b'"modelRewrite":"x"', b'"weight":-1', b'"matches":[]', b'"priority":9999', b'"poolRef":'),
    )
    encode = staticmethod(as_json)

    def __init__(self) -> None:
        objects: list[Any] = [
            pod("a", "10.0.0.1"),
            pod("b", "fd00::1"),
            pool(),
            policy("p"),
            policy("q", mode="DryRun"),
            dated_rewrite("r", weighted_rule("gpt", a=1, b=None), weighted_rule(fallback=3)),
            Objective(ObjectMeta("o"), ObjectiveSpec(7, PoolRef("vllm"))),
        ]
        documents = [json.loads(msgspec.json.encode(each)) for each in objects]
        lines = [
            json.dumps({"type": kind, "object": d})
            for d in documents
            for kind in ("ADDED", "MODIFIED", "DELETED")
        ]
        pages = [json.dumps({"metadata": {"resourceVersion": "5"}, "items": [d]}) for d in documents]
        self.documents: Sequence[object] = [json.loads(each) for each in (*lines, *pages)]
        gone = json.dumps({"type": "ERROR", "object": {"code": 410, "message": "too old"}})
        self.seeds: Sequence[bytes] = [each.encode() for each in (*lines, *pages, gone)]
        self._pods = pods_of("vllm", pool(8000).spec)
        self._pools = Collection("pool", Pool, "/", read=lambda found, _: pool_ports(found.spec))
        self._policies = PolicySet(pools=["vllm"])
        (self._rewrites,) = rewrites_in(["llm-d.ai"], pools=["vllm"])
        (self._objectives,) = objectives_in(["llm-d.ai"], pools=["vllm"])
        self._picker = small_picker()
        self._now = itertools.count(1.0)

    async def feed(self, data: bytes) -> bool:
        taken = False
        for collection in (self._pods, self._policies.claims, self._pools):
            for reader in (_Reader(page=data), _Reader(line=data)):
                taken |= await _follow(reader, collection)
        # One way is enough for these: their pages and lines are read like those of the others.
        one_way = {"page" if b'"items"' in data else "line": data}
        taken |= await _follow(_Reader(**one_way), self._rewrites)
        taken |= await _follow(_Reader(**one_way), self._objectives)
        return taken

    async def check(self) -> None:
        endpoints = united([self._pods.found])
        assert len({e.name for e in endpoints}) == len(endpoints) == len({e.address for e in endpoints})
        self._picker.news.set_endpoints(endpoints, now=next(self._now))
        assert all(0 < port < 65_536 for ports in self._pools.found.values() for port in ports)
        outcome = self._policies.resolve(default=SMALL, existing=["vllm"])
        check_policies(self._policies)
        judged = judge_rewrites([self._rewrites], existing=["vllm"], served=None)
        wanted = [*self._policies.wanted(outcome), *judged]
        await StatusWriter(_Writes()).look(wanted, now=0.0, time_text="t")
        check_collection(self._rewrites)
        rewrites = all_rewrites([self._rewrites])
        self._picker.news.set_rewrites(rewrites)
        for model in ("gpt", "m", ""):
            inference = InferenceRequest(kind=ApiKind.OTHER, model=model)
            assert len(rewrites.target(inference, session="", request_id="r")) <= MAX_NAME_CHARS
        assert all(abs(priority) <= 1000 for priority in merged([self._objectives]).values())
        one_pick(self._picker, now=next(self._now))


class _Writes(Api):
    """An API server that accepts any status that can be encoded."""

    def __init__(self) -> None:
        super().__init__(None)

    async def request(self, method: str, path: str, *, query: Query = (), body: object = None) -> bytes:
        return msgspec.json.encode(body)


class _Reader(Api):
    """An API server that sends one answer and then hangs."""

    def __init__(
        self, *, page: bytes = b'{"metadata":{"resourceVersion":"1"},"items":[]}', line: bytes = b""
    ) -> None:
        self._page: bytes | None = page
        self._line = line
        self.done = asyncio.Event()

    async def request(self, method: str, path: str, *, query: Query = (), body: object = None) -> bytes:
        page, self._page = self._page, None
        if page is None:
            self.done.set()
            await asyncio.get_running_loop().create_future()
        assert page is not None
        return page

    async def watch(self, path: str, *, query: Query, idle_s: float) -> AsyncGenerator[bytes]:
        yield b""
        line, self._line = self._line, b""
        if line:
            yield line
        self.done.set()
        await asyncio.get_running_loop().create_future()


async def _follow(reader: _Reader, collection: Collection[Any, Any]) -> bool:
    """Return True if the answer was accepted and the watch goes on."""
    states: list[bool] = []
    access = Access(
        reader,
        namespace="n",
        on_state=lambda _, answers: states.append(answers),
        keep=Sources(rng=random.Random(1)).keep,
        rng=_NoPauses(),
        group=asyncio.TaskGroup(),
    )
    reflector = Reflector(access, collection, on_change=lambda: None)
    task = asyncio.ensure_future(reflector.run())
    done = asyncio.ensure_future(reader.done.wait())
    await asyncio.wait((task, done), return_when=asyncio.FIRST_COMPLETED)
    done.cancel()
    check_reflector(reflector)
    ended = task.done()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert not ended
    return False not in states


class _NoPauses(random.Random):
    """Without pauses, a refused answer is asked for again at once."""

    def uniform(self, a: float, b: float) -> float:
        return 0.0
