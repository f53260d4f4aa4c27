"""A stored table is read from Redis in pieces. No call copies more than one of them."""

from __future__ import annotations

import pytest

from epp.config.sharing import Redis
from epp.sources.sharing.link import LinkError, Received
from epp.sources.sharing.redis_link import MOST_PIECE_BYTES, RedisLink
from epp.sources.sharing.signed import Seal
from epp.sources.sharing.tables import MOST_TABLE_BYTES
from tests.harness.fake_redis import FakeRedis


async def read(redis: FakeRedis, *, seal: Seal | None = None) -> Received | None:
    settings = Redis(url="redis://127.0.0.1:1")
    link = RedisLink(settings, seal=seal, clock=lambda: 1_000.0, connect=lambda _: (redis, []))
    return await link.stored()


@pytest.mark.parametrize("size", [0, 1, MOST_PIECE_BYTES - 4, MOST_PIECE_BYTES, 5 * MOST_PIECE_BYTES - 4])
async def test_a_table_of_any_size_is_read_completely(size: int) -> None:
    table = (bytes(range(251)) * (size // 251 + 1))[:size]
    redis = FakeRedis(b"5-1\n" + table)
    found = await read(redis)
    assert found is not None
    assert bytes(found.data) == table
    assert max(redis.asked) == MOST_PIECE_BYTES


async def test_without_a_stored_table_none_is_returned() -> None:
    assert await read(FakeRedis(b"")) is None


async def test_a_table_over_the_bound_is_not_read_completely() -> None:
    redis = FakeRedis(b"5-1\n" + bytes(MOST_TABLE_BYTES + 9 * MOST_PIECE_BYTES))
    with pytest.raises(LinkError, match="the stored table has more than"):
        await read(redis)
    assert sum(redis.asked) <= MOST_TABLE_BYTES + 2 * MOST_PIECE_BYTES


async def test_a_table_that_is_replaced_meanwhile_is_read_again() -> None:
    old, new = b"5-1\n" + bytes(2 * MOST_PIECE_BYTES), b"6-1\n" + b"x" * 2 * MOST_PIECE_BYTES
    found = await read(FakeRedis(old, new))
    assert found is not None
    assert bytes(found.data) == new[4:]
    with pytest.raises(LinkError, match="replaced each time"):
        await read(FakeRedis(*[old, new, new, new] * 3))


async def test_a_table_that_the_pools_key_did_not_sign_is_not_returned() -> None:
    seal = Seal(b"a key that nobody guesses")
    signed = seal.sign("table", b"table", channel="") + b"table"
    found = await read(FakeRedis(b"5-1\n" + signed), seal=seal)
    assert found is not None
    assert found.data == b"table"
    assert await read(FakeRedis(b"5-1\ntable"), seal=seal) is None
