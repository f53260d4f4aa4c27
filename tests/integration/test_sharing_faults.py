"""Redis is killed, stalled, full or refuses. No pick waits or fails, and sharing goes on afterwards."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from epp.config.sharing import Redis
from tests.harness.ports import free_port
from tests.harness.processes import wait_until
from tests.harness.redis_server import Fault, Kind, RedisServer, faulty, one_address, running_redis
from tests.harness.sharing import Sharer, both_ways, met, sharing_over
from tests.unit.picker.picker_questions import text

FAULTS: list[Fault] = ["killed", "stalled", "full", "refusing", "read-only", "loses its data"]


@asynccontextmanager
async def two_over(server: RedisServer) -> AsyncIterator[tuple[Sharer, Sharer]]:
    redis = Redis(url=server.url)
    async with sharing_over(redis) as one, sharing_over(redis) as other:
        await met(one, other)
        yield one, other


@pytest.mark.parametrize("fault", FAULTS)
async def test_picks_go_on_through_a_fault_and_are_reported_when_it_is_over(
    tmp_path: Path, fault: Fault
) -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(tmp_path))
        one, other = await stack.enter_async_context(two_over(server))
        await both_ways(one, other, name="before")
        async with faulty(server, fault, stack, directory=tmp_path):
            if fault != "loses its data":
                await wait_until(
                    lambda: all(s.counts.errors.total() for s in (one, other)), what="an error", timeout_s=60
                )
            for n in range(50):
                assert one.serve(text(f"meanwhile {n}")).decision.chosen
                assert other.serve(text(f"meanwhile too {n}")).decision.chosen
        await met(one, other, timeout_s=120)
        await both_ways(one, other, name="after")
        if fault != "loses its data":
            await other.learns(text("meanwhile 49"))
            await one.learns(text("meanwhile too 49"))
        assert one.counts.dropped_events == 0
        await wait_until(
            lambda: not any(each.replica.in_flight_of_peers() for each in (one, other)),
            what="the ends of all requests are known",
        )


async def test_a_redis_that_answers_late_delays_reports_and_nothing_else(tmp_path: Path) -> None:
    async with (
        running_redis(tmp_path) as server,
        one_address(server) as address,
        sharing_over(Redis(url=address.url), outbox_bytes=2**16) as one,
        sharing_over(Redis(url=address.url), outbox_bytes=2**16) as other,
    ):
        await met(one, other)
        speaker, counts = one.replica.exchange, one.counts
        for late_s, kind in ((0.5, "late"), (4.0, "too late")):
            address.late_s = late_s
            for n in range(600):
                one.serve(text(f"{kind} {n}"))
            assert speaker.waiting_bytes <= 2**16
            assert speaker.counts.dropped_events > 0
            if kind == "late":
                await other.learns(text("late 599"))
                assert not counts.errors
        await wait_until(lambda: counts.errors["timeout"] >= 2, what="answers came too late", timeout_s=60)
        address.late_s = 0.0
        await met(one, other)
        await both_ways(one, other, name="after")
        assert speaker.waiting_bytes <= 2**16


async def test_after_a_failover_behind_one_address_pickers_find_the_new_master(tmp_path: Path) -> None:
    async with (
        running_redis(tmp_path) as master,
        running_redis(tmp_path) as replica,
        one_address(master) as address,
        sharing_over(Redis(url=address.url)) as one,
        sharing_over(Redis(url=address.url)) as other,
    ):
        await met(one, other)
        for n in range(50):  # each needs a second connection when a report falls into a blocking read
            if address.accepted == 4:
                break
            await both_ways(one, other, name=f"before {n}")
        assert address.accepted == 4
        address.server = replica
        await master.do("REPLICAOF", "127.0.0.1", replica.port)  # its connections stay open
        await both_ways(one, other, name="after")
        await met(one, other)
        (stream,) = [key for key in await replica.do("KEYS", "*") if key.endswith(b":stream")]
        assert await replica.do("XLEN", stream) > 0
        for sharer in (one, other):
            assert 1 <= sharer.counts.errors.total() <= 8, sharer.counts.errors
            assert sharer.counts.dropped_events == 0
        assert address.accepted <= 12


async def test_a_node_that_is_not_the_right_one_gets_few_connections(tmp_path: Path) -> None:
    """The server of the address stays a replica, so every attempt is refused."""
    async with (
        running_redis(tmp_path) as server,
        one_address(server) as address,
        sharing_over(Redis(url=address.url), outbox_bytes=2**16) as one,
    ):
        await wait_until(lambda: one.service.connected, what="the picker joins")
        await server.do("REPLICAOF", "127.0.0.1", free_port())
        counts, speaker = one.counts, one.replica.exchange
        for n in range(600):
            one.serve(text(str(n)))
        await wait_until(lambda: counts.errors.total() >= 8, what="several refusals", timeout_s=60)
        assert speaker.waiting_bytes <= 2**16
        assert address.accepted <= 4 * counts.errors.total()
        await server.do("REPLICAOF", "NO", "ONE")
        await wait_until(lambda: one.service.connected, what="the picker is back", timeout_s=60)
        await wait_until(lambda: not speaker.waiting_bytes, what="what waited is sent")


@pytest.mark.parametrize("kind", ["redis", "valkey"])
async def test_a_picker_that_joins_has_the_table_of_the_others_at_once(tmp_path: Path, kind: Kind) -> None:
    async with running_redis(tmp_path, kind=kind) as server, two_over(server) as (one, other):
        prompts = [text(f"conversation {n}", 20_000) for n in range(300)]
        for n, prompt in enumerate(prompts):
            (one, other)[n % 2].serve(prompt)
        await other.learns(prompts[-2])
        await one.learns(prompts[-1])
        async with sharing_over(Redis(url=server.url)) as joined:
            await wait_until(lambda: joined.service.warm, what="the new picker is ready", timeout_s=60)
            new, old = joined.replica.picker, one.replica.picker
            await wait_until(
                lambda: new.caches.table.entries >= 0.9 * old.caches.table.entries,
                what="the new picker has nine tenths of the table",
                timeout_s=60,
            )


async def test_a_key_of_another_type_is_an_error_and_sharing_goes_on_without_it(tmp_path: Path) -> None:
    async with running_redis(tmp_path) as server:
        redis = Redis(url=server.url)
        async with sharing_over(redis) as one:
            stream = f"{one.replica.exchange.channel('p')}:stream"
        await server.do("DEL", stream)
        await server.do("SET", stream, "in the way")
        async with sharing_over(redis) as two:
            await wait_until(lambda: two.counts.errors["refused"] > 0, what="the picker counts the error")
            assert two.serve(text("p")).decision.chosen
            await server.do("DEL", stream)
            await wait_until(lambda: two.service.connected, what="the picker is connected")
