"""Batches of others: in order or not, late, damaged, or about unknown servers."""

from dataclasses import replace as changed

import msgspec
import pytest

from epp.base.types import Address, Endpoint, EndpointMetrics, EndpointName
from epp.config.policy import PolicySpec, Table
from epp.sources.sharing import listener
from epp.sources.sharing.batches import MalformedBatchError, SharedBegan, decode_batch, encode
from tests.unit.picker.picker_questions import policy_of, text
from tests.unit.sources.sharing.pickers import TIMEOUT_S, Replica, endpoints, meet, two


def test_requests_of_a_picker_that_is_silent_for_the_timeout_are_released() -> None:
    one, other = two()
    one.pick(text("p"), now=10.0)
    one.picker.on_response_headers(one.pick(text("q"), now=10.0), status=200, served=None, now=10.0)
    other.receive(one.send(now=10.0), now=10.0)
    assert other.matched(text("p"), now=10.0)
    other.exchange.listener.expire(now=10.0 + TIMEOUT_S)
    assert other.in_flight_of_peers() != {}
    other.exchange.listener.expire(now=10.1 + TIMEOUT_S)
    assert other.in_flight_of_peers() == {}
    assert other.undone(now=16.0) == 0
    assert other.exchange.listener.peers == 0
    assert not other.matched(text("p"), now=16.0), "nobody knows whether it was computed"
    assert other.matched(text("q"), now=16.0)


def test_a_late_batch_keeps_a_dead_pickers_requests_only_while_it_lives() -> None:
    one, other = two()
    one.pick(text("p"), now=10.0)
    other.receive(one.send(now=10.0), now=14.8, age_s=4.8)
    assert other.in_flight_of_peers() != {}
    other.exchange.listener.expire(now=12.0 + TIMEOUT_S)
    assert other.in_flight_of_peers() == {}


def test_a_living_picker_that_is_always_late_is_not_forgotten() -> None:
    one, other = two()
    one.pick(text("p"), now=10.0)
    for n in range(5):
        other.receive(one.send(now=10.0 + n), now=14.8 + n, age_s=4.8)
        other.exchange.listener.expire(now=16.3 + n)
        assert other.in_flight_of_peers() != {}


def test_a_missing_batch_releases_what_came_before_and_costs_nothing_else() -> None:
    one, other = two()
    turn = text("p", 40_000)
    one.pick(text("s"), now=9.0)
    other.receive(one.send(now=9.0), now=9.0)
    one.pick(turn, now=10.0)
    one.send(now=10.0)
    one.pick(turn + text("q"), now=11.0)
    other.receive(one.send(now=11.0), now=11.0)
    assert other.exchange.counts.gaps == 1
    assert sum(other.in_flight_of_peers().values()) == 1, "only the request of the batch that was heard"
    assert other.matched(turn + text("q"), now=12.0) == one.matched(turn + text("q"), now=12.0)


def test_a_batch_that_is_sent_twice_counts_once() -> None:
    one, other = two()
    one.pick(text("p"), now=10.0)
    batches = one.send(now=10.0)
    other.receive(batches + batches, now=10.0)
    assert sum(other.in_flight_of_peers().values()) == 1


def test_the_open_requests_of_all_other_pickers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_MOST_OPEN", 3)
    replicas = [Replica(n) for n in range(3)]
    for n, replica in enumerate(2 * replicas[:2]):
        replica.pick(text(f"p{n}"), now=1.0)
    meet(replicas, now=1.0)
    assert sum(replicas[2].in_flight_of_peers().values()) == 3


def test_news_from_before_a_restart_does_not_restore_what_server_has_lost() -> None:
    one, other = two()
    pick = one.pick(text("p"), now=10.0)
    batches = one.send(now=10.0)
    other.sees_restart(pick.decision.chosen, now=10.2)
    other.receive(batches, now=10.3, age_s=0.3)
    assert other.matched(text("p"), now=10.3) == {}
    assert other.exchange.counts.skipped["stale"] == 1
    one.pick(text("p"), now=10.4)
    other.receive(one.send(now=10.45), now=10.5, age_s=0.05)
    assert set(other.matched(text("p"), now=10.5)) == {pick.decision.chosen}


def test_news_of_another_process_of_the_same_name_is_ignored() -> None:
    one, other = two()
    other.picker.news.set_endpoints(endpoints(incarnation="2"), now=5.0)
    one.pick(text("p"), now=10.0)
    other.receive(one.send(now=10.0), now=10.0)
    assert other.matched(text("p"), now=10.0) == {}
    assert other.exchange.counts.skipped["stale"] == 1


def test_a_restart_that_one_picker_sees_clears_all_tables_once() -> None:
    one, other = two()
    pick = one.pick(text("p"), now=10.0)
    other.receive(one.send(now=10.0), now=10.0)
    one.sees_restart(pick.decision.chosen, now=20.0)
    batches = one.send(now=20.0)
    other.receive(batches, now=20.0)
    assert other.matched(text("p"), now=20.0) == {}
    again = other.pick(text("p"), now=20.5)
    other.end(again, now=21.0)
    third = Replica(3)
    third.sees_restart(pick.decision.chosen, now=21.0)
    other.receive(third.send(now=21.0), now=21.0)
    assert other.matched(text("p"), now=21.0), "a second report of the same restart"


def test_events_of_an_unknown_endpoint_are_only_counted() -> None:
    one, other = Replica(1, on=endpoints("abc")), Replica(2, on=endpoints("a"))
    meet([one, other], now=0.0)
    for n in range(6):
        pick = one.pick(text(str(n)), now=1.0)
        one.end(pick, now=2.0)
    other.receive(one.send(now=2.0), now=2.0)
    assert other.exchange.counts.skipped["stranger"] > 0
    assert other.in_flight_of_peers() == {}


def test_a_server_that_was_only_tried_gets_no_prompt_of_an_unknown_one() -> None:
    one, other = Replica(1, on=endpoints("ab")), Replica(2, on=endpoints("a"))
    meet([one, other], now=0.0)
    first, second = (each.address for each in endpoints("ab"))
    pick = one.pick(text("p"), now=1.0, only=first)
    one.picker.on_response_headers(pick, status=200, served=second, now=1.5)
    one.picker.end(pick, outcome="ended", now=3.0)
    other.receive(one.send(now=3.0), now=3.0)
    (tried,) = other.picker.fleet.states()
    assert other.matched(text("p"), now=3.0) == {}
    assert other.picker.fleet.failures.share(tried, now=3.0) > 0


def test_an_endpoint_that_leaves_with_requests_of_others_is_forgotten() -> None:
    one, other = two()
    pick = one.pick(text("p"), now=10.0)
    other.receive(one.send(now=10.0), now=10.0)
    other.picker.news.set_endpoints([Endpoint(EndpointName("z"), Address("10.0.0.9", 8000))], now=10.5)
    one.end(pick, now=11.0)
    other.receive(one.send(now=11.0), now=11.0)
    assert other.undone(now=11.0) == 0


def test_a_batch_that_is_malformed_in_its_middle_counts_as_missing() -> None:
    one, other = two()
    picks = [one.pick(text(name), now=10.0) for name in "pq"]
    other.receive(one.send(now=10.0), now=10.0)
    assert sum(other.in_flight_of_peers().values()) == 2
    one.pick(text("r"), now=11.0)
    for pick in picks:
        one.end(pick, now=11.0)
    [data] = one.send(now=11.0)
    batch = decode_batch(data)
    began = batch.events[0]
    assert isinstance(began, SharedBegan)
    cut = msgspec.structs.replace(began, chain=began.chain[:-1])
    damaged = msgspec.structs.replace(batch, events=[cut, *batch.events[1:]])
    with pytest.raises(MalformedBatchError, match="not a list of hashes"):
        list(other.exchange.listener.apply(encode(damaged), now=11.0))
    other.receive(one.send(now=12.0), now=12.0)
    assert other.exchange.counts.gaps == 1
    assert other.in_flight_of_peers() == {}, "the ends of two requests were in the rest of it"


def test_a_batch_older_than_the_timeout_teaches_prefixes_and_books_nothing() -> None:
    one, other = two()
    one.pick(text("p"), now=10.0)
    late_s = TIMEOUT_S + 0.1
    other.receive(one.send(now=10.0), now=10.0 + late_s, age_s=late_s)
    assert other.in_flight_of_peers() == {}
    assert other.matched(text("p"), now=16.0)


def test_old_batches_are_read_to_their_end_while_silent_pickers_expire() -> None:
    """A picker that joins reads what the link kept, in many turns of the loop."""
    one, other = two()
    pick = one.pick(text("p"), now=10.0)
    other.receive(one.send(now=10.0), now=70.0, age_s=60.0)
    other.exchange.listener.expire(now=70.1)
    one.end(pick, now=11.0)
    other.receive(one.send(now=11.0), now=70.2, age_s=59.2)
    assert other.matched(text("p"), now=71.0)


@pytest.mark.parametrize(("age_s", "excluded"), [(0.0, {"failing"}), (60.0, {""})])
def test_failures_in_old_batches_say_nothing_about_a_server_now(age_s: float, excluded: set[str]) -> None:
    one, other = two()
    for n in range(4):
        only = Address("10.0.0.1", 8000)
        one.end(one.pick(text(str(n)), now=10.0, only=only), now=10.1, status=500)
    other.receive(one.send(now=10.2), now=10.2 + age_s, age_s=age_s)
    candidates = other.pick(text("q"), now=10.3 + age_s).decision.candidates
    assert {c.excluded for c in candidates if c.name == "a"} == excluded


def test_another_pickers_guess_evicts_nothing_until_it_is_proven() -> None:
    policy = policy_of(PolicySpec(table=Table(default_capacity_tokens=2000)))
    one, other = (Replica(n, on=endpoints("a"), policy=policy) for n in (1, 2))
    meet([one, other], now=0.0)
    other.end(other.pick(text("old"), now=1.0), now=1.0)
    pick = one.pick(text("new", 3000), now=2.0)
    other.receive(one.send(now=2.0), now=2.0)
    other.picker.tidy(now=2.0)
    whole = other.matched(text("old"), now=2.0)
    assert other.matched(text("new", 3000), now=2.0) == one.matched(text("new", 3000), now=2.0) != {}
    one.picker.on_response_headers(pick, status=200, served=None, now=3.0)
    other.receive(one.send(now=3.0), now=3.0)
    other.picker.tidy(now=3.0)
    assert other.matched(text("old"), now=3.0)[EndpointName("a")] < whole[EndpointName("a")]
    assert other.matched(text("new", 3000), now=3.0)


@pytest.mark.parametrize("status", [400, 501, 503, None])
def test_a_guess_of_another_picker_goes_if_its_request_comes_to_nothing(status: int | None) -> None:
    one, other = two()
    pick = one.pick(text("p"), now=10.0)
    other.receive(one.send(now=10.0), now=10.0)
    if status is not None:
        one.picker.on_response_headers(pick, status=status, served=None, now=11.0)
    one.picker.end(pick, outcome="aborted" if not status else "failed" if status > 500 else "ended", now=11.0)
    other.receive(one.send(now=11.0), now=11.0)
    assert other.matched(text("p"), now=11.0) == {}
    assert other.in_flight_of_peers() == {}
    # A server that says no at once is not idle, and a client that leaves says nothing about it.
    assert [state.account.noes for state in other.picker.fleet.states()].count(1) == (status is not None)
    for picker in (one.picker, other.picker):
        assert bool(picker.fleet.failures.marks) == (status == 503)


@pytest.mark.parametrize("ttft_count", [None, 0.0])
@pytest.mark.parametrize(("ends_at", "noes"), [(11.0, 1), (15.0, 0)])
def test_pickers_count_the_same_answers_without_a_token(
    ttft_count: float | None, ends_at: float, noes: int
) -> None:
    """Without a counter of first tokens, the headers of a streamed answer prove its prompt."""
    one, other = two()
    for n in (0, 1):
        page = EndpointMetrics(scraped_at=9.0 + n, running=0, ttft_count=ttft_count)
        one.picker.news.observe(EndpointName("a"), page, now=9.0 + n)
    pick = one.pick(text("p"), now=10.0, only=Address("10.0.0.1", 8000))
    one.picker.on_response_headers(pick, status=200, served=None, now=11.0)
    one.picker.end(pick, outcome="ended", now=ends_at)
    other.receive(one.send(now=ends_at), now=ends_at)
    for replica in (one, other):
        accounts = [(each.account.noes, each.account.no_tokens) for each in replica.picker.fleet.states()]
        assert accounts == [(noes, noes * pick.prompt.tokens), (0, 0)]


def test_others_know_the_prompt_and_adapter_of_a_stream_that_was_let_go() -> None:
    on = [changed(e, adapters=frozenset({"sql"})) for e in endpoints()]
    one, other = Replica(1, on=on), Replica(2, on=on)
    meet([one, other], now=0.0)
    for n in (0, 1):
        page = EndpointMetrics(scraped_at=9.0 + n, running=0, ttft_count=0.0)
        one.picker.news.observe(EndpointName("a"), page, now=9.0 + n)
    pick = one.pick(text("p"), now=10.0, model="sql", only=Address("10.0.0.1", 8000))
    one.picker.on_response_headers(pick, status=200, served=None, now=10.5)
    one.picker.detach(pick, now=10.5)
    other.receive(one.send(now=11.0), now=11.0)
    assert other.picker.caches.table.match(pick.chain) == {}
    page = EndpointMetrics(scraped_at=12.0, running=0, ttft_count=1.0)
    one.picker.news.observe(EndpointName("a"), page, now=12.0)
    other.receive(one.send(now=12.0), now=12.0)
    assert other.picker.caches.table.match(pick.chain) == one.picker.caches.table.match(pick.chain) != {}
    assert other.picker.fleet.states()[0].loaded_adapters == {"sql"}
