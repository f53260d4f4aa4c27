"""The picker asks servers for their models over real HTTP. Some servers behave well, and others do not."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from aiohttp import web

from epp.base.types import Address, Endpoint, EndpointName, ModelList
from epp.config.settings import Models
from epp.sources.scraping.model_lists import ModelLists, soon_s
from epp.sources.scraping.page_client import ApiKey
from tests.harness.listening import Handler, serving_path
from tests.harness.processes import wait_until
from tests.harness.tasks import running_task


class ReportedLists:
    """The lists and the silent servers that `ModelLists` reported."""

    def __init__(self) -> None:
        self.lists: dict[EndpointName, ModelList] = {}
        self.silent: set[EndpointName] = set()
        """Servers that were asked and did not answer with a list."""
        self.portions = 0
        self.unknown = 0

    def take(self, lists: Mapping[EndpointName, ModelList | None]) -> None:
        self.portions += 1
        self.lists.update({name: listed for name, listed in lists.items() if listed is not None})
        self.silent |= {name for name, listed in lists.items() if listed is None}


@asynccontextmanager
async def asking(
    heard: ReportedLists, *, key_file: str = "", **servers: Address
) -> AsyncIterator[ModelLists]:
    lists = ModelLists(
        settings=Models(),
        key=ApiKey(key_file),
        on_lists=heard.take,
        unknown_asked=lambda: heard.unknown,
        clock=time.monotonic,
        rng=Random(1),
    )
    lists.set_endpoints([Endpoint(EndpointName(name), address) for name, address in servers.items()])
    async with running_task(lists.run):
        yield lists


def listing(*names: str) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in names]})

    return answer


async def hang(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(b" " * 2**16)
    return response


async def locked(_: web.Request) -> web.Response:
    return web.Response(status=401)


async def test_every_server_is_asked_and_bad_ones_delay_no_other() -> None:
    heard = ReportedLists()
    async with AsyncExitStack() as stack:
        addresses = {
            name: await stack.enter_async_context(serving_path("/v1/models", handler))
            for name, handler in {
                "a": listing("m"),
                "b": hang,
                "c": endless,
                "d": locked,
                "e": listing("n"),
            }.items()
        }
        hang_too = {f"b{n}": addresses["b"] for n in range(40)}
        async with asking(heard, key_file="", **hang_too, **addresses) as lists:
            await wait_until(lambda: len(heard.lists) == 2, what="the good ones have answered")
            assert not hang_too.keys() & heard.silent, "they were asked before, and are still waited for"
            without = {EndpointName(name) for name in ("c", "d")}
            await wait_until(lambda: without <= heard.silent, what="two servers have no list")
            assert not lists.asked_all, "one hangs"
            await wait_until(lambda: lists.asked_all, what="a start waits for it no longer")
    assert {name: listed.base for name, listed in heard.lists.items()} == {"a": "m", "e": "n"}


async def test_new_servers_are_asked_in_turns_of_their_own() -> None:
    left = {f"models of s{n}" for n in range(40)}
    servers = {f"s{n}": Address("127.0.0.1", 1) for n in range(40)}
    heard = ReportedLists()
    async with asking(heard, key_file="", **servers) as lists:
        while left:
            await asyncio.sleep(0)
            begun = left & {task.get_name() for task in asyncio.all_tasks()}
            assert len(begun) <= 1
            left -= begun
        lists.clock = lambda: time.monotonic() + 10.0  # the start is over
        new = {EndpointName(f"new-{n}") for n in range(100)}
        lists.set_endpoints([Endpoint(name, servers["s0"]) for name in new])
        began = time.monotonic()
        await wait_until(lambda: new <= heard.silent, what="all were asked")
        assert time.monotonic() - began > 0.8, "a hundred in a second, however fast the machine is"


async def test_a_start_waits_until_every_server_was_asked_once() -> None:
    heard = ReportedLists()
    async with (
        serving_path("/v1/models", listing("m")) as good,
        serving_path("/v1/models", locked) as bad,
        asking(heard, a=good, b=bad) as lists,
    ):
        await wait_until(lambda: lists.asked_all, what="both were asked")
        assert (set(heard.lists), heard.silent) == ({"a"}, {"b"}), "and the lists are in use"
    async with asking(ReportedLists()) as lists:
        await wait_until(lambda: lists.asked_all, what="no server has to be asked")


async def test_a_new_process_is_asked_at_once_and_its_list_replaces_the_old_one() -> None:
    heard = ReportedLists()
    async with (
        serving_path("/v1/models", listing("m")) as first,
        serving_path("/v1/models", listing("n")) as second,
        asking(heard, a=first) as lists,
    ):
        await wait_until(lambda: EndpointName("a") in heard.lists, what="the first answer")
        lists.set_endpoints([Endpoint(EndpointName("a"), second)])
        await wait_until(lambda: heard.lists[EndpointName("a")].base == "n", what="the second answer")


async def test_a_renewed_key_is_sent_with_the_next_question_and_never_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys: list[str | None] = []

    async def with_key(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization"))
        return web.json_response({"data": [{"id": "m"}]}, status=200 if keys[-1] == "Bearer new-key" else 401)

    file = tmp_path / "key"
    file.write_text("old-key\n")
    heard = ReportedLists()
    async with (
        serving_path("/v1/models", with_key) as address,
        asking(heard, key_file=str(file), a=address) as lists,
    ):
        await wait_until(lambda: EndpointName("a") in heard.silent, what="the old key is refused")
        file.write_text("two\nlines")
        lists.set_endpoints([Endpoint(EndpointName("a"), address, incarnation="2")])
        await wait_until(lambda: len(keys) == 2, what="the file is no key")
        file.write_text("new-key\n")
        lists.set_endpoints([Endpoint(EndpointName("a"), address, incarnation="3")])
        await wait_until(lambda: EndpointName("a") in heard.lists, what="the new key opens the list")
    assert keys == ["Bearer old-key", None, "Bearer new-key"]
    assert "models.apiKeyFile" in caplog.text
    assert not any(secret in caplog.text for secret in ("old-key", "new-key", "two"))


async def test_a_request_for_an_unknown_model_has_the_servers_asked_again_soon() -> None:
    heard, names = ReportedLists(), ["m"]

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in names]})

    async with serving_path("/v1/models", answer) as address, asking(heard, a=address):
        await wait_until(lambda: EndpointName("a") in heard.lists, what="the first answer")
        names.append("fresh")
        heard.unknown += 1
        await wait_until(lambda: "fresh" in heard.lists[EndpointName("a")].names, what="the adapter is known")
    assert heard.portions == 2


def test_for_unknown_models_a_large_fleet_is_asked_at_the_allowed_pace() -> None:
    assert soon_s(4) == 5
    assert soon_s(1000) == 50
