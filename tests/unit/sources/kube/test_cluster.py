"""The picker's part in a cluster, as a whole, beside an API server that answers over HTTP from memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from aiohttp import web

from epp.base.types import Endpoint
from epp.config.policy import DEFAULT_POLICY, Metadata, Policy
from epp.config.sections import Kubernetes
from epp.request.rewriting import Rewrites
from epp.sources.keep import Sources
from epp.sources.kube.cluster import Cluster
from tests.harness.kubeconfig import write_kubeconfig
from tests.harness.listening import serving
from tests.harness.processes import wait_until
from tests.unit.sources.kube.objects import pod, policy, rewrite, rule

pytest.importorskip("kubernetes")

GROUP = "llm-d.ai"


class ApiServer:
    """Lists objects by the plural of their kind. An unknown kind gets 404. Watches stay silent."""

    def __init__(self, **objects: list[Any]) -> None:
        self.objects = objects
        self.wrote: list[tuple[str, str, str]] = []
        """Method, end of the path, and content type of each write."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        place = request.path.rpartition("/namespaces/n/")[2]
        if request.method != "GET":
            self.wrote.append((request.method, place, request.content_type))
            return web.json_response({**await request.json(), "metadata": {"name": place.split("/")[-1]}})
        if request.query.get("watch"):
            response = web.StreamResponse()
            await response.prepare(request)
            await asyncio.get_running_loop().create_future()
        if place not in self.objects:
            return web.json_response({"message": "not found", "code": 404}, status=404)
        items = msgspec.to_builtins(self.objects[place])
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})


class News:
    """Records what the composition root hears from the cluster."""

    def __init__(self) -> None:
        self.endpoints: list[str] = []
        self.trouble = [MemoryError()]
        """Raised by the first call about policies."""
        self.acting: Policy = DEFAULT_POLICY
        self.tried: Policy | None = None
        self.followed: dict[str, bool] = {}
        self.judged: tuple[int, list[str]] = (0, [])
        self.objectives: dict[str, int] = {}
        self.rewrites = Rewrites(())
        self.hooks: dict[str, Any] = {
            "on_endpoints": lambda found, *_: self.take_endpoints(*found),
            "on_policies": self.take_policies,
            "served": lambda: None,
            "on_state": self.followed.__setitem__,
            "on_judged": lambda *judged: setattr(self, "judged", judged),
            "on_objectives": lambda found: setattr(self, "objectives", dict(found)),
            "on_rewrites": lambda found: setattr(self, "rewrites", found),
        }

    def take_endpoints(self, *found: Endpoint) -> None:
        self.endpoints = [endpoint.name for endpoint in found]

    def take_policies(self, acting: Policy, tried: Policy | None) -> None:
        if self.trouble:
            raise self.trouble.pop()
        self.acting, self.tried = acting, tried


@asynccontextmanager
async def following_cluster(
    server: ApiServer, folder: Path, *, writes: bool = False, **settings: Any
) -> AsyncIterator[tuple[News, Cluster]]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    async with serving(app) as port:
        kubeconfig = write_kubeconfig(folder, server=f"http://127.0.0.1:{port}", user={})
        news = News()
        cluster = Cluster(
            settings=Kubernetes(
                pool="vllm",
                selector={"app": "vllm"},
                target_ports=(8000,),
                kubeconfig=str(kubeconfig),
                **settings,
            ),
            **news.hooks,
            default=DEFAULT_POLICY,
            writes=writes,
            keep=Sources(rng=Random(1)).keep,
            rng=Random(1),
        )
        running = asyncio.create_task(cluster.run())
        try:
            yield news, cluster
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def objective(name: str, priority: int) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"priority": priority, "poolRef": {"name": "vllm"}}}


async def test_endpoints_policy_priorities_and_names_come_from_the_cluster(tmp_path: Path) -> None:
    server = ApiServer(
        pods=[pod("a", "10.0.0.1"), pod("b", "10.0.0.2", ready=False)],
        prefixroutingpolicies=[policy("p", rule="random"), policy("q", mode="DryRun", rule="affinity")],
        inferenceobjectives=[objective("urgent", 7)],
        inferencemodelrewrites=[rewrite("r", rule("gpt", target="llama"))],
    )
    async with following_cluster(server, tmp_path, objectives=(GROUP,), rewrites=(GROUP,)) as (news, _):
        news.trouble *= 1_000
        await wait_until(lambda: {*news.objectives, *news.rewrites.aliases} == {"urgent", "gpt"}, what="both")
        assert news.objectives == {"urgent": 7}
        news.trouble.clear()  # policies that cannot be used hold back nothing else
        await wait_until(lambda: news.endpoints == ["a:8000"], what="the endpoints")
        await wait_until(lambda: news.tried is not None, what="the policies")
        assert (news.acting.spec.rule, news.acting.metadata.name) == ("random", "p")
        assert news.tried is not None
        assert news.tried.spec.rule == "affinity"
        assert news.judged == (2, [])
        assert all(news.followed.values())
    assert server.wrote == [], "this process does not write"


async def test_a_policy_that_is_refused_is_reported_with_its_fault(tmp_path: Path) -> None:
    server = ApiServer(pods=[], prefixroutingpolicies=[policy("p"), policy("q", rule="nonsense")])
    async with following_cluster(server, tmp_path) as (news, _):
        await wait_until(lambda: news.judged[0] == 1, what="the verdicts")
        (fault,) = news.judged[1]
        assert fault.startswith("policy q is not accepted: ")
        assert "nonsense" in fault


async def test_an_api_group_that_the_cluster_lacks_is_reported(tmp_path: Path) -> None:
    server = ApiServer(pods=[pod("a", "10.0.0.1")], prefixroutingpolicies=[])
    async with following_cluster(server, tmp_path, objectives=(GROUP,)) as (news, _):
        await wait_until(lambda: news.endpoints == ["a:8000"], what="the endpoints")
        await wait_until(lambda: "objectives of llm-d.ai" in news.followed, what="the answer 404")
        await wait_until(lambda: "policies" in news.followed, what="the policies")
        assert (news.followed["objectives of llm-d.ai"], news.followed["policies"]) == (False, True)


async def test_the_default_policy_can_change_while_no_object_routes(tmp_path: Path) -> None:
    other = Policy(DEFAULT_POLICY.api_version, DEFAULT_POLICY.kind, Metadata(name="other"))
    async with following_cluster(ApiServer(pods=[], prefixroutingpolicies=[]), tmp_path) as (news, cluster):
        cluster.set_default(other)
        await wait_until(lambda: news.acting is other, what="the new default")


async def test_the_process_that_writes_writes_the_status(tmp_path: Path) -> None:
    server = ApiServer(pods=[pod("a", "10.0.0.1")], prefixroutingpolicies=[policy("p")])
    async with following_cluster(server, tmp_path, writes=True):
        await wait_until(lambda: server.wrote != [], what="the status")
    assert server.wrote == [("PATCH", "prefixroutingpolicies/p/status", "application/merge-patch+json")]
