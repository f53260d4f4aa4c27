"""Several InferencePools with an API server in memory: which endpoints there are, and when."""

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest

from epp.base.types import Endpoint
from epp.config.sections import Kubernetes
from epp.sources.keep import Sources
from epp.sources.kube.api import Api, ApiError, Query
from epp.sources.kube.objects import Pod, Pool
from epp.sources.kube.pools import Pools
from epp.sources.kube.reflector import Access
from tests.harness.processes import wait_until
from tests.harness.tasks import running_task
from tests.invariants.kube import check_pools
from tests.unit.sources.kube.objects import pod, pool

SELECTORS = {"a": {"model": "a"}, "b": {"model": "b"}}


class WatchedServer(Api):
    """Objects by collection and name. Each list or event goes to all watchers."""

    def __init__(self) -> None:
        self.pools: dict[str, Pool] = {}
        self.pods: dict[str, list[Pod]] = {}
        """Pods by label selector."""
        self.refused: set[str] = set()
        """Selectors whose lists are refused."""
        self._watching: defaultdict[str, asyncio.Queue[bytes]] = defaultdict(asyncio.Queue)

    async def request(self, method: str, path: str, *, query: Query = (), body: object = None) -> bytes:
        key = self._key(query)
        if key in self.refused:
            raise ApiError("forbidden", status=403)
        name = key.removeprefix("metadata.name=")
        items: Sequence[Pod | Pool] = self.pods.get(key, [])
        if path.endswith("inferencepools"):
            items = [self.pools[name]] if name in self.pools else []
        return json.dumps(
            {"metadata": {"resourceVersion": "1"}, "items": msgspec.to_builtins(items)}
        ).encode()

    async def watch(self, path: str, *, query: Query, idle_s: float) -> AsyncGenerator[bytes]:
        queue = self._watching[self._key(query)]
        yield b""
        while True:
            yield await queue.get()

    async def put(self, found: Pool) -> None:
        self.pools[found.metadata.name] = found
        await self._tell("ADDED", found)

    async def remove(self, name: str) -> None:
        await self._tell("DELETED", self.pools.pop(name))

    async def _tell(self, kind: str, found: Pool) -> None:
        queue = self._watching[f"metadata.name={found.metadata.name}"]
        await queue.put(json.dumps({"type": kind, "object": msgspec.to_builtins(found)}).encode())

    def _key(self, query: Query) -> str:
        fields = dict(query)
        return fields.get("labelSelector") or fields["fieldSelector"]


class ReceivedLists:
    """The lists that the picker received."""

    def __init__(self, server: WatchedServer, group: asyncio.TaskGroup, *names: str) -> None:
        self.sets: list[list[str]] = []
        self.followed: dict[str, bool] = {}
        self.failures = 0
        """How often from now on the endpoints cannot be used."""
        self.starting: frozenset[str] = frozenset()
        self._news = asyncio.Event()
        rng = random.Random(1)
        access = Access(server, "n", self.followed.__setitem__, Sources(rng=rng).keep, rng, group)
        self.pools = Pools(access, Kubernetes(pools=names), on_endpoints=self._take, on_pool=lambda: None)

    def _take(
        self, endpoints: Sequence[Endpoint], existing: frozenset[str], starting: frozenset[str]
    ) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the disk is full")
        assert existing == self.pools.existing
        self.starting = starting
        self.sets.append([f"{e.name} {e.pool}" for e in endpoints])
        self._news.set()

    async def next(self) -> list[str]:
        """Return the next list of endpoints that the picker receives."""
        async with asyncio.timeout(60):
            await self._news.wait()
        self._news.clear()
        check_pools(self.pools)
        return self.sets[-1]


@asynccontextmanager
async def following_pools(
    server: WatchedServer, *names: str, failures: int = 0
) -> AsyncIterator[ReceivedLists]:
    made: asyncio.Future[ReceivedLists] = asyncio.get_running_loop().create_future()

    async def follow() -> None:
        async with asyncio.TaskGroup() as group:
            made.set_result(lists := ReceivedLists(server, group, *names))
            lists.failures = failures
            lists.pools.start()

    async with running_task(follow):
        yield await made


def two_pools() -> WatchedServer:
    server = WatchedServer()
    server.pools = {
        "a": pool(8000, name="a", labels=SELECTORS["a"], uid="ua"),
        "b": pool(9000, name="b", labels=SELECTORS["b"], uid="ub"),
    }
    server.pods = {"model=a": [pod("x", "10.0.0.1")], "model=b": [pod("y", "10.0.0.2")]}
    return server


async def test_each_pool_has_its_own_selector_and_ports() -> None:
    async with following_pools(two_pools(), "a", "b") as found:
        assert await found.next() == ["x:8000 a", "y:9000 b"]
        assert found.sets == [["x:8000 a", "y:9000 b"]], "never one pool without the other"


async def test_a_pool_can_come_and_go_while_another_stays() -> None:
    server = two_pools()
    late = server.pools.pop("b")
    async with following_pools(server, "a", "b") as found:
        assert await found.next() == ["x:8000 a"]
        assert found.pools.existing == {"a"}
        await server.put(late)
        assert await found.next() == ["x:8000 a", "y:9000 b"]
        assert found.pools.existing == {"a", "b"}
        await server.remove("a")
        assert await found.next() == ["y:9000 b"]
        assert found.pools.existing == {"b"}


async def test_the_picker_hears_in_which_pools_a_server_starts() -> None:
    server = two_pools()
    server.pods["model=b"] = [pod("y", "10.0.0.2", ready=False, started=False)]
    async with following_pools(server, "a", "b") as found:
        assert await found.next() == ["x:8000 a"]
        assert found.starting == {"b"}


async def test_the_picker_also_hears_that_a_pool_without_pods_was_deleted() -> None:
    server = two_pools()
    server.pods["model=none"] = []
    async with following_pools(server, "a", "b") as found:
        await found.next()
        await server.put(pool(8000, name="a", labels={"model": "none"}, uid="ua"))
        assert await found.next() == ["y:9000 b"]
        assert found.pools.existing == {"a", "b"}
        await server.remove("a")
        assert await found.next() == ["y:9000 b"]
        assert found.pools.existing == {"b"}


async def test_no_list_is_sent_while_one_pool_cannot_be_read() -> None:
    server = two_pools()
    server.refused.add("metadata.name=b")
    async with following_pools(server, "a", "b") as found:
        await wait_until(lambda: found.followed == {"pool": False, "pods": True}, what="b is refused")
        assert not found.pools.settled
        server.refused.clear()
        assert await found.next() == ["x:8000 a", "y:9000 b"]
        assert found.followed == {"pool": True, "pods": True}


async def test_pods_of_a_deleted_pool_are_not_reported_as_refused() -> None:
    server = two_pools()
    server.refused.add("model=b")
    async with following_pools(server, "a", "b") as found:
        await wait_until(lambda: found.followed == {"pool": True, "pods": False}, what="they are refused")
        await server.remove("b")
        await wait_until(lambda: found.followed == {"pool": True, "pods": True}, what="nobody needs them")


async def test_old_pods_stay_until_those_of_a_new_selector_are_listed() -> None:
    server = two_pools()
    server.refused.add("app=x,model=b2")
    server.pods["app=x,model=b2"] = [pod("z", "10.0.0.3")]
    async with following_pools(server, "a", "b") as found:
        await found.next()
        await server.put(pool(9001, name="b", labels={"model": "b2", "app": "x"}, uid="ub"))
        await server.put(pool(8001, name="a", labels=SELECTORS["a"], uid="ua"))
        assert await found.next() == ["x:8001 a", "y:9000 b"]
        server.refused.clear()
        assert await found.next() == ["x:8001 a", "z:9001 b"]


async def test_endpoints_that_cannot_be_used_are_passed_on_again(caplog: pytest.LogCaptureFixture) -> None:
    async with following_pools(two_pools(), "a", failures=2) as made:
        assert await made.next()
        assert made.pools.settled
        assert "the new endpoints cannot be used yet: the disk is full" in caplog.text
