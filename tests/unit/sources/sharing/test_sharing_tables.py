"""A stored table: a picker that loads it holds the entries of its maker, in the same order of eviction."""

from __future__ import annotations

import msgspec
import pytest

from epp.base.types import EndpointMetrics, EndpointName
from epp.sources.sharing.batches import HASH_BYTES, MOST_CHUNKS, MalformedBatchError, pack_hashes
from epp.sources.sharing.exchange import Exchange
from epp.sources.sharing.speaker import identity_of
from epp.sources.sharing.tables import Portion, WrittenUse, encode_table, table_portions, uses_of
from tests.unit.picker.picker_questions import text
from tests.unit.sources.sharing.pickers import Replica, endpoints


def a_used_replica(*, requests: int = 300) -> Replica:
    """Serve conversations over a few shared beginnings, some with charged answers, and more than the
    servers can hold.
    """
    replica = Replica(1, on=endpoints("abc"))
    for name in "abc":
        page = EndpointMetrics(
            scraped_at=0.0, capacity_tokens=60_000, prompt_tokens=1000.0, generated_tokens=0.0
        )
        replica.picker.observe(EndpointName(name), page, now=0.0)
    for n in range(requests):
        now = 1.0 + n
        pick = replica.pick(text(f"shared {n % 7}") + text(f"user {n % 40}", 2000 + 500 * (n % 5)), now=now)
        replica.end(pick, now=now + 0.5)
        if n % 50 == 0:
            name = EndpointName("abc"[n // 50 % 3])
            page = EndpointMetrics(
                scraped_at=now, capacity_tokens=60_000, prompt_tokens=1000.0 + n, generated_tokens=100.0 * n
            )
            replica.picker.observe(name, page, now=now)
        replica.picker.housekeep(now=now)
    return replica


def stored_table(exchange: Exchange) -> bytes:
    return encode_table(list(table_portions(exchange.picker)))


def loaded(data: bytes, *, now: float = 500.0) -> Replica:
    other = Replica(2, on=endpoints("abc"))
    for _ in other.exchange.listener.load(data, now=now, age_s=1.0):
        other.check()
    return other


def test_a_loaded_table_holds_the_stored_entries_in_the_same_order() -> None:
    one = a_used_replica()
    other = loaded(stored_table(one.exchange))
    for name in map(EndpointName, "abc"):
        assert other.picker.table.mirrors[name].entries == one.picker.table.mirrors[name].entries > 0
        assert other.picker.table.mirrors[name].used_bytes == one.picker.table.mirrors[name].used_bytes
        assert (
            other.picker.table.mirrors[name].capacity_bytes == one.picker.table.mirrors[name].capacity_bytes
        )
        uses = [list(map(list, (chain,))) for chain, _ in uses_of(one.picker.table, name)]
        assert [list(map(list, (chain,))) for chain, _ in uses_of(other.picker.table, name)] == uses
    for n in range(40):
        prompt = text(f"shared {n % 7}") + text(f"user {n}", 2000 + 500 * (n % 5))
        assert other.matched(prompt, now=500.0) == one.matched(prompt, now=500.0)


def test_shared_beginnings_are_stored_once() -> None:
    one = Replica(1, on=endpoints("a"))
    for n in range(50):
        one.pick(text("shared", 50_000) + text(str(n), 300), now=1.0 + n)
    assert len(stored_table(one.exchange)) < 4000, "97 chunks of 8 bytes, and 50 times a chunk or two"


def test_a_loaded_table_keeps_what_the_picker_has_learned_meanwhile() -> None:
    one = a_used_replica()
    data = stored_table(one.exchange)
    other = Replica(2, on=endpoints("abc"))
    mine = other.pick(text("mine"), now=499.0)
    for _ in other.exchange.listener.load(data, now=500.0, age_s=0.1):
        other.check()
    assert mine.decision.chosen in other.matched(text("mine"), now=500.0)
    assert other.picker.table.entries == one.picker.table.entries


def test_entries_of_a_server_that_restarted_unseen_are_dropped() -> None:
    data = stored_table(a_used_replica().exchange)
    other = loaded(data)
    a, b = EndpointName("a"), EndpointName("b")
    other.picker.observe(a, EndpointMetrics(scraped_at=501.0, prompt_tokens=20.0), now=501.0)
    other.picker.observe(b, EndpointMetrics(scraped_at=501.0, prompt_tokens=9000.0), now=501.0)
    other.exchange.listener.expire(now=501.0)
    assert other.picker.table.mirrors[a].entries == 0
    assert other.picker.table.mirrors[b].entries > 0
    other.check()


def test_entries_of_a_server_that_lost_its_cache_are_dropped() -> None:
    data = stored_table(a_used_replica().exchange)
    other = Replica(2, on=endpoints("abc"))
    other.picker.set_endpoints(endpoints("abc", incarnation="2"), now=499.5)
    other.picker.set_endpoints(endpoints("abc"), now=499.8)
    for _ in other.exchange.listener.load(data, now=500.0, age_s=1.0):
        other.check()
    assert other.picker.table.entries == 0


@pytest.mark.parametrize("data", [b"", b"\x91\x91\xc4\x01x", b"\x91\x91\x95", b"nonsense"])
def test_bytes_that_are_not_a_table_are_one_typed_error(data: bytes) -> None:
    other = Replica(2)
    with pytest.raises(MalformedBatchError):
        for _ in other.exchange.listener.load(data, now=1.0, age_s=0.0):
            pass
    other.check()


def a_table(replica: Replica, uses: list[WrittenUse]) -> bytes:
    state = next(iter(replica.picker.fleet.states()))
    portion = Portion(state.endpoint.name, identity_of(state), 2**30, None, uses)
    return encode_table([msgspec.msgpack.encode(portion)])


LONG = (0, 0, pack_hashes(range(1, MOST_CHUNKS + 1)), 0)


def test_a_long_portion_is_loaded_in_steps() -> None:
    replica = Replica(1)
    again = [(0, MOST_CHUNKS, b"", 0)] * 6
    steps = sum(1 for _ in replica.exchange.listener.load(a_table(replica, [LONG, *again]), now=1, age_s=0))
    assert steps >= 7
    replica.check()


@pytest.mark.parametrize(
    ("uses", "why"),
    [
        ([(0, 1, b"", 0)], "does not stand before it"),
        ([LONG, (0, MOST_CHUNKS, bytes(HASH_BYTES), 0)], "too many chunks"),
        ([LONG] + [(0, MOST_CHUNKS, b"", 0)] * 8, "too many chunks"),
        ([(0, 0, b"1", 0)], "not a list of hashes"),
    ],
)
def test_a_portion_whose_chains_cannot_be_made_is_refused(uses: list[WrittenUse], why: str) -> None:
    replica = Replica(1)
    with pytest.raises(MalformedBatchError, match=why):
        for _ in replica.exchange.listener.load(a_table(replica, uses), now=1.0, age_s=0.0):
            pass
    replica.check()
