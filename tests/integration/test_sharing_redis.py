"""Pickers share over real Redis and Valkey: one server, cluster or sentinel, with TLS and passwords."""

import signal
import socket
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from epp.config.sharing import Redis, RedisTls
from epp.observe.telemetry.picker_state import PickerStatus
from epp.observe.telemetry.pool_status import PoolStatus, pools_of
from epp.picker.prefix_index.secret import HashSecret, derived
from epp.serve.state_report import endpoints_of
from epp.sources.sharing.redis_link import RedisLink
from tests.harness.certificate import write_tls
from tests.harness.processes import wait_until
from tests.harness.redis_server import Kind, running_cluster, running_redis, running_sentinel, tls_in_front
from tests.harness.sharing import Sharer, both_ways, met, sharing_over
from tests.unit.picker.picker_questions import text


@pytest.mark.core
@pytest.mark.parametrize("kind", ["redis", "valkey"])
async def test_pickers_learn_from_each_other_over_one_server(tmp_path: Path, kind: Kind) -> None:
    async with running_redis(tmp_path, kind=kind) as server:
        redis = Redis(url=server.url)
        async with sharing_over(redis) as one, sharing_over(redis) as other:
            await met(one, other)
            await both_ways(one, other, name="p")
            pick = one.pick(text("long"))
            await wait_until(
                lambda: other.replica.in_flight_of_peers() == {pick.decision.chosen: 1},
                what="the load of the other picker is known",
            )
            assert not one.counts.errors


def seen_pool(sharer: Sharer, *, now: float) -> PoolStatus:
    picker = sharer.replica.picker
    (pool,) = pools_of(PickerStatus(endpoints=endpoints_of(picker, {}, now=now)))
    return pool


async def test_replicas_agree_on_an_autoscalers_signals_within_five_percent(tmp_path: Path) -> None:
    """Each of three pickers has a third of the requests. Without sharing, each would report a third of the
    undone work.
    """
    async with running_redis(tmp_path) as server, AsyncExitStack() as stack:
        redis = Redis(url=server.url)
        sharers = [await stack.enter_async_context(sharing_over(redis)) for _ in range(3)]
        await met(*sharers)
        began = time.monotonic()
        for number in range(60):
            sharers[number % 3].pick(text(f"p{number}", 160_000))
        first = seen_pool(sharers[0], now=began)
        sent_s = 3 * first.waiting_s["servers"]
        assert sent_s > 40, "more tokens than the servers compute while the test waits"

        def agree() -> bool:
            now = time.monotonic()
            pools = [seen_pool(sharer, now=now) for sharer in sharers]
            waits = [pool.waiting_s["servers"] for pool in pools]
            gauges = [pool.saturation for pool in pools]
            whole = min(waits) >= 0.95 * (sent_s - (now - began))
            return whole and max(waits) <= 1.05 * min(waits) and max(gauges) <= 1.05 * min(gauges)

        await wait_until(agree, what="all report the work of the whole pool", timeout_s=sent_s / 2)


async def test_the_stream_is_bounded_and_an_unused_channel_goes_away(tmp_path: Path) -> None:
    async with running_redis(tmp_path) as server:
        redis = Redis(url=server.url)
        async with sharing_over(redis) as one:
            await wait_until(lambda: one.service.connected, what="the picker joins")
            link = RedisLink(redis)
            await link.join(one.replica.exchange.channel("p"))
            for _ in range(11_000):
                await link.send(b"no batch")
            await link.close()
            (stream,) = [key for key in await server.do("KEYS", "*") if key.endswith(b":stream")]
            assert 10_000 <= await server.do("XLEN", stream) <= 10_300

        async def all_expire() -> bool:
            return all([await server.do("PTTL", key) > 0 for key in await server.do("KEYS", "*")])

        await wait_until(all_expire, what="every key has its end")


async def test_a_password_and_an_acl_user_are_read_from_files(tmp_path: Path) -> None:
    secret, wrong = tmp_path / "secret", tmp_path / "wrong"
    secret.write_text("s3cret\n")
    wrong.write_text("other")
    async with running_redis(tmp_path, password="s3cret") as server:
        await server.do("ACL", "SETUSER", "picker", "on", ">s3cret", "~prefix-gateway:*", "+@all")
        plain = Redis(url=server.url, password_file=str(secret))
        named = Redis(url=server.url, username="picker", password_file=str(secret))
        async with sharing_over(plain) as one, sharing_over(named) as other:
            await met(one, other)
            await both_ways(one, other, name="p")
        for bad in (Redis(url=server.url), Redis(url=server.url, password_file=str(wrong))):
            async with sharing_over(bad) as refused:
                await wait_until(lambda s=refused: s.counts.errors["auth"] > 0, what="a refusal")  # type: ignore[misc]  # as above
                assert refused.serve(text("p")).decision.chosen


async def test_a_password_that_is_renewed_is_read_again(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("old")
    async with (
        running_redis(tmp_path, password="old") as server,
        sharing_over(Redis(url=server.url, password_file=str(secret))) as one,
    ):
        await wait_until(lambda: one.service.connected, what="Redis lets the picker in")
        await server.do("CONFIG", "SET", "requirepass", "new")
        server.password = "new"
        await server.do("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await wait_until(lambda: one.counts.errors["auth"] > 2, what="the old password is refused")
        assert one.serve(text("p")).decision.chosen
        secret.write_text("new")
        await wait_until(lambda: one.service.connected, what="Redis lets the picker in again", timeout_s=60)


@pytest.mark.core
async def test_tls_is_verified_and_a_certificate_shown_where_one_is_asked_for(tmp_path: Path) -> None:
    tls = write_tls(tmp_path)
    cert, key = Path(tls.cert_file), Path(tls.key_file)
    ours = RedisTls(ca_file=str(cert), cert_file=str(cert), key_file=str(key))
    async with (
        running_redis(tmp_path) as server,
        tls_in_front(server, cert=cert, key=key, mutual=True) as port,
    ):
        redis = Redis(url=f"rediss://127.0.0.1:{port}", tls=ours)
        async with sharing_over(redis) as one, sharing_over(redis) as other:
            await met(one, other)
            await both_ways(one, other, name="p")
        untrusting = Redis(url=f"rediss://127.0.0.1:{port}")
        nameless = Redis(url=f"rediss://127.0.0.1:{port}", tls=RedisTls(ca_file=str(cert)))
        other_name = Redis(url=f"rediss://127.0.0.2:{port}", tls=ours)
        for bad in (untrusting, nameless, other_name):
            async with sharing_over(bad) as refused:
                await wait_until(
                    lambda s=refused: s.counts.errors.total() > 0,  # type: ignore[misc]  # as above
                    what="the picker does not connect",
                )
                assert not refused.service.connected


@pytest.mark.parametrize("kind", ["redis", "valkey"])
async def test_a_cluster_keeps_a_channel_on_one_node_and_is_found_through_any(
    tmp_path: Path, kind: Kind
) -> None:
    async with running_cluster(tmp_path, kind=kind) as servers, AsyncExitStack() as stack:
        urls = [f"redis+cluster://127.0.0.1:{server.port}" for server in servers]
        sharers = [await stack.enter_async_context(sharing_over(Redis(url=url))) for url in urls]
        await met(*sharers)
        await both_ways(sharers[0], sharers[1], name="p")
        await both_ways(sharers[1], sharers[2], name="q")
        keys = [await server.do("KEYS", "*:stream") for server in servers]
        assert sorted(map(bool, keys)) == [False, False, True]


async def test_pickers_follow_a_sentinel_past_a_silent_one_to_the_new_master(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        master = await stack.enter_async_context(running_redis(tmp_path))
        follower = [f"replicaof 127.0.0.1 {master.port}"]
        replica = await stack.enter_async_context(running_redis(tmp_path, options=follower))
        sentinel = await stack.enter_async_context(running_sentinel(tmp_path, master=master, name="main"))
        redis = Redis(url=f"redis+sentinel://127.0.0.1:{silent},127.0.0.1:{sentinel.port}/main")
        one, other = [await stack.enter_async_context(sharing_over(redis)) for _ in range(2)]
        await met(one, other)
        await both_ways(one, other, name="before")

        async def followed() -> bool:
            return bool(await sentinel.do("SENTINEL", "REPLICAS", "main"))

        await wait_until(followed, what="the sentinel knows the replica", timeout_s=60)
        master.process.signal(signal.SIGKILL)

        async def promoted() -> bool:
            replication: dict[str, object] = await replica.do("INFO", "replication")
            return replication["role"] == "master"

        await wait_until(promoted, what="the replica is master", timeout_s=120)
        await met(one, other, timeout_s=120)
        await both_ways(one, other, name="after")


def made(letter: bytes) -> HashSecret:
    return HashSecret(letter * 32, made_here=True)


async def test_pickers_that_made_their_own_hash_secrets_agree_on_one(tmp_path: Path) -> None:
    async with running_redis(tmp_path) as server:
        redis = Redis(url=server.url)
        async with (
            sharing_over(redis, secret=made(b"a")) as one,
            sharing_over(redis, secret=made(b"b")) as other,
        ):
            await met(one, other)
            await both_ways(one, other, name="p")
            secret = one.replica.picker.caches.secret
            assert secret == other.replica.picker.caches.secret
            assert secret in (made(b"a"), made(b"b"))
            await server.do("FLUSHALL")
            async with sharing_over(redis, secret=secret) as third:
                await met(one, other, third)
                assert one.replica.picker.caches.secret == third.replica.picker.caches.secret == secret


async def test_pickers_whose_given_hash_secrets_differ_notice_and_share_nothing(tmp_path: Path) -> None:
    async with running_redis(tmp_path) as server:
        redis = Redis(url=server.url)
        async with AsyncExitStack() as stack:
            one = await stack.enter_async_context(sharing_over(redis, secret=derived(b"one")))
            same = await stack.enter_async_context(sharing_over(redis, secret=derived(b"one")))
            await met(one, same)  # The two pickers use the pool's secret from now on.
            other = await stack.enter_async_context(sharing_over(redis, secret=derived(b"other")))
            third = await stack.enter_async_context(sharing_over(redis, secret=made(b"a")))
            for apart in (other, third):
                await wait_until(lambda s=apart: s.counts.errors["secret"] > 0, what="it notices")  # type: ignore[misc]  # as above
            one.serve(text("p"))
            await same.learns(text("p"))
            assert (other.peers, third.peers) == (0, 0)
            assert not other.knows(text("p"))
            assert not third.knows(text("p"))
