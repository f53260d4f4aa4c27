"""Which servers are asked for a model. The source declares models, and servers list models themselves."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from epp.base.errors import NoEndpointError, UnknownModelError
from epp.base.types import Endpoint, EndpointMetrics, EndpointName, ModelCard, ModelList
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.fleet_news import FleetNews
from tests.invariants.picker import check_news
from tests.unit.picker.endpoints.fleets import news_of, state_of
from tests.unit.picker.endpoints.lettered import endpoint


def listing(*bases: str, adapters: Sequence[str] = ()) -> ModelList:
    return ModelList(
        (*(ModelCard(name) for name in bases), *(ModelCard(name, parent=bases[0]) for name in adapters))
    )


def servers(names: str, *, refuses: bool = True, **lists: ModelList | None) -> FleetNews:
    news = news_of(*map(endpoint, names), refuses=refuses)
    take(news, **lists)
    return news


def pools_of(**pools: str) -> FleetNews:
    """pools: the names of the endpoints of each pool."""
    return news_of(*(endpoint(name, pool=pool) for pool, names in pools.items() for name in names))


def take(news: FleetNews, **lists: ModelList | None) -> None:
    news.take_lists({EndpointName(name): listed for name, listed in lists.items()}, now=1.0)
    check_news(news)


def names_that_serve(news: FleetNews, model: str) -> str:
    return "".join(sorted(news.fleet.states()[slot].endpoint.name for slot in news.fleet.served.slots(model)))


def picked_from(news: FleetNews, model: str, subset: str) -> str:
    allowed = {endpoint(name).address for name in subset}
    slots, _ = news.fleet.candidates(model, subset=allowed)
    return "".join(sorted(news.fleet.states()[slot].endpoint.name for slot in slots))


def test_the_length_that_a_server_lists_is_known_to_its_state() -> None:
    cards = (ModelCard("m", max_model_len=8192), ModelCard("sql", parent="m"))
    states = {
        state.endpoint.name: state for state in servers("ab", a=ModelList(cards), b=None).fleet.states()
    }
    assert (states[EndpointName("a")].max_model_len, states[EndpointName("b")].max_model_len) == (8192, None)


def test_a_model_goes_to_the_servers_that_list_it() -> None:
    news = servers("abc", a=listing("m"), b=listing("n", adapters=["sql"]), c=listing("n", "alias"))
    assert [names_that_serve(news, model) for model in ("m", "n", "sql", "alias")] == ["a", "bc", "b", "c"]
    assert [news.fleet.served.adapter(model) for model in ("m", "n", "sql", "alias")] == ["", "", "sql", ""]
    assert not news.fleet.served.one_model


def test_unknown_model_is_an_error_once_every_server_has_listed_its_models() -> None:
    news = servers("abc", a=listing("m"), b=listing("n"), c=None)
    assert names_that_serve(news, "ghost") == "c", "only this server may have the model"
    assert names_that_serve(news, "m") == "a"
    take(news, c=listing("n"))
    with pytest.raises(UnknownModelError, match="'ghost' does not exist") as raised:
        news.fleet.served.slots("ghost")
    assert (raised.value.status, raised.value.reason) == (404, "model_not_found")
    assert news.fleet.served.unknown_asked == 1
    assert names_that_serve(news, "m") == "a"


def test_unknown_models_go_to_any_server_if_they_are_not_refused() -> None:
    news = servers("ab", refuses=False, a=listing("m"), b=listing("n"))
    assert names_that_serve(news, "ghost") == "ab"
    assert names_that_serve(news, "n") == "b"


def test_a_server_without_a_list_gets_no_request_for_a_model_of_others() -> None:
    news = pools_of(llama="ab", mistral="cd")
    take(news, a=listing("llama"), b=None, c=listing("mistral"), d=None)
    assert [names_that_serve(news, model) for model in ("llama", "mistral")] == ["a", "c"]
    assert names_that_serve(news, "ghost") == "bd", "nobody lists the model, and one of these may have it"


def observe(news: FleetNews, name: str, **page: Any) -> EndpointState:
    state = state_of(news.fleet, name)
    state.take_page(EndpointMetrics(scraped_at=1.0, running=0, waiting=0, **page), now=1.0)
    return state


def test_names_on_a_page_stand_for_a_list_that_the_server_does_not_give() -> None:
    news = servers("abc", a=listing("m", "alias"), c=listing("n"))
    state = observe(news, "b", models=frozenset({"m"}))
    take(news, b=None)
    assert [names_that_serve(news, model) for model in ("m", "alias", "ghost")] == ["ab", "a", "b"]
    assert (state.model, len(news.fleet.served.unlisted)) == ("m", 1), "so no model is unknown"
    assert "ghost" not in str(news.fleet.served.model_list())
    take(news, b=listing("n"))
    assert [names_that_serve(news, model) for model in ("m", "n")] == ["a", "bc"]
    take(news, b=None)
    assert names_that_serve(news, "n") == "bc", "a list stays while its server cannot be asked"


def test_names_on_pages_exclude_no_server_whose_page_has_not_come() -> None:
    news = servers("abc")
    observe(news, "a", models=frozenset({"m"}))
    take(news, a=None, b=None)
    assert [names_that_serve(news, model) for model in ("m", "ghost")] == ["abc", "abc"]
    observe(news, "b", models=frozenset({"n"}))
    take(news, b=None)
    assert names_that_serve(news, "m") == "ac"


def test_a_page_without_names_changes_nothing() -> None:
    news = servers("ab", a=listing("m"))
    observe(news, "b")
    take(news, b=None)
    assert names_that_serve(news, "m") == "a"


def test_a_server_that_sleeps_gets_no_requests_until_it_wakes() -> None:
    news = servers("ab", a=listing("m"), b=listing("m"))
    observe(news, "a", asleep=True)
    assert picked_from(news, "m", "ab") == "b"
    observe(news, "b", asleep=True)
    with pytest.raises(NoEndpointError, match="sleep"):
        picked_from(news, "m", "ab")
    observe(news, "a")
    assert picked_from(news, "m", "ab") == "a"
    check_news(news)


def test_a_long_prompt_goes_to_a_server_that_lists_the_length() -> None:
    short, long = (ModelList((ModelCard("m", max_model_len=length),)) for length in (8192, 32768))
    news = servers("abc", a=short, b=long, c=short)
    slots, _ = news.fleet.candidates("m", subset=None)
    assert [list(news.fleet.served.fitting(slots, tokens=tokens)) for tokens in (8192, 8193, 32769)] == [
        [0, 1, 2], [1], [0, 1, 2],
    ]  # fmt: skip
    take(news, b=short)
    assert news.fleet.served.fitting(slots, tokens=10_000) is slots, "all take the same"


def test_a_model_that_no_server_lists_goes_to_a_pool_without_any_list() -> None:
    news = pools_of(llama="ab", mistral="cd")
    assert names_that_serve(news, "mistral") == "abcd"
    take(news, a=listing("llama"), b=None)
    assert names_that_serve(news, "mistral") == "cd"
    assert names_that_serve(news, "llama") == "a"


def test_an_adapter_that_was_seen_on_a_page_stays_in_its_pool() -> None:
    news = pools_of(one="ab", two="c")
    take(news, a=listing("m"), b=listing("m"), c=listing("m"))
    observe(news, "a", active_adapters=frozenset({"fresh"}))
    assert names_that_serve(news, "fresh") == "ab"


def test_a_new_server_gets_no_model_of_others_until_it_lists_it() -> None:
    news = servers("abcd", a=listing("m"), b=listing("n"))
    assert [names_that_serve(news, model) for model in ("m", "n", "ghost")] == ["a", "b", "cd"]
    take(news, c=listing("m"), d=listing("n"))
    assert [names_that_serve(news, model) for model in ("m", "n")] == ["ac", "bd"]
    anew = [endpoint(name) for name in "abd"]
    news.set_endpoints([*anew, endpoint("c", model="k")], now=2.0)
    news.set_endpoints([*anew, endpoint("c")], now=3.0)
    assert [names_that_serve(news, model) for model in ("m", "n")] == ["a", "bd"], (
        "this is another process than before"
    )


def with_endpoints(news: FleetNews, *, existing: str, now: float, **pools: str) -> None:
    endpoints = [endpoint(name, pool=pool) for pool, names in pools.items() for name in names]
    news.set_endpoints(endpoints, now=now, pools=frozenset(existing))
    check_news(news)


def test_a_model_whose_pool_has_no_server_now_is_not_ready() -> None:
    news = news_of()
    with_endpoints(news, existing="pq", now=0.0, p="a", q="b")
    take(news, a=listing("m", adapters=["sql"]), b=listing("n"))
    with_endpoints(news, existing="pq", now=1.0, q="b")
    news.give_up_left(now=10_000.0)
    for model in ("m", "sql"):
        with pytest.raises(NoEndpointError) as raised:
            news.fleet.served.slots(model)
        assert (raised.value.status, raised.value.reason) == (503, "no_ready_endpoint")
    assert json.loads(news.fleet.served.model_list() or b"")["data"][0]["id"] == "n"
    with_endpoints(news, existing="q", now=2.0, q="b")
    with pytest.raises(UnknownModelError):
        news.fleet.served.slots("m")


def test_a_model_whose_server_left_is_not_ready_then_unknown() -> None:
    news = news_of()
    with_endpoints(news, existing="p", now=0.0, p="ab")
    take(news, a=listing("m"), b=listing("n"))
    with_endpoints(news, existing="p", now=1.0, p="b")
    news.give_up_left(now=300.0)
    with pytest.raises(NoEndpointError):
        news.fleet.served.slots("m")
    news.give_up_left(now=301.0)
    with pytest.raises(UnknownModelError):
        news.fleet.served.slots("m")


def test_a_declared_model_goes_only_to_the_endpoints_that_declare_it() -> None:
    news = news_of(endpoint("a", model="m"), endpoint("b"))
    assert names_that_serve(news, "m") == "a"
    take(news, a=listing("served-name"), b=None)
    assert names_that_serve(news, "m") == "a"
    assert names_that_serve(news, "served-name") == "a"


def test_within_a_subset_a_model_that_only_others_have_is_unknown() -> None:
    news = servers("abc", a=listing("m"), b=listing("n"), c=None)
    assert picked_from(news, "m", "ab") == "a"
    with pytest.raises(UnknownModelError):
        picked_from(news, "m", "b")
    assert picked_from(news, "m", "bc") == "c", "the server's list is not known"
    with pytest.raises(NoEndpointError):
        picked_from(news, "m", "")


def test_servers_that_list_same_model_learn_together_and_others_separately() -> None:
    news = servers("abc", a=listing("m"), b=listing("m"), c=listing("n"))
    a, b, c = (state.rate.model for state in news.fleet.states())
    assert a is b is not c
    assert list(news.fleet.columns.roster.models) == ["m", "m", "n"]


def test_a_server_that_lists_another_model_than_before_is_another_server() -> None:
    news = servers("ab", a=listing("m"), b=listing("m"))
    state = state_of(news.fleet, "a")
    before = state.process
    take(news, a=listing("m", adapters=["sql"]))
    assert state.process == before
    take(news, a=listing("n"))
    assert (state.process, state.model) == (before + 1, "n")


def test_a_new_process_has_no_list_yet_and_other_servers_keep_theirs() -> None:
    news = servers("ab", a=listing("m"), b=listing("n"))
    again = [endpoint("a"), Endpoint(EndpointName("b"), endpoint("b").address, incarnation="2")]
    news.set_endpoints(again, now=2.0)
    assert names_that_serve(news, "m") == "a"
    assert [names_that_serve(news, model) for model in ("n", "ghost")] == ["b", "b"], (
        "no other server has the model"
    )


def test_the_union_has_every_model_once_by_name() -> None:
    news = servers("abc", a=listing("m", adapters=["sql"]), b=listing("m"), c=listing("b"))
    news.fleet.served.set_aliases({name: frozenset({"m"}) for name in ("m", "gpt")})
    listed = json.loads(news.fleet.served.model_list() or b"")
    assert listed["object"] == "list"
    assert [card["owned_by"] for card in listed["data"]] == ["", "prefix-gateway", "", ""]
    assert [(card["id"], card["parent"]) for card in listed["data"]] == [
        ("b", None), ("gpt", None), ("m", None), ("sql", "m"),
    ]  # fmt: skip
    assert set(listed["data"][0]) == {
        "id", "object", "created", "owned_by", "root", "parent", "max_model_len",
    }  # fmt: skip
    take(news, c=listing("z"))
    assert b'"id":"z"' in (news.fleet.served.model_list() or b""), "the list follows its servers"


def test_a_change_of_one_list_does_not_read_the_cards_of_the_others_again() -> None:
    class Cards(tuple[ModelCard, ...]):
        __slots__ = ()
        read = 0

        def __iter__(self) -> Iterator[ModelCard]:
            Cards.read += len(self)
            return super().__iter__()

    a, b, c = (ModelList(Cards(ModelCard(f"{name}{n}") for n in range(512))) for name in "abc")
    news = servers("abc", a=a, b=b, c=c)
    assert names_that_serve(news, "b511") == "b"
    before = Cards.read
    assert before > 0
    take(news, a=listing("m"))
    assert names_that_serve(news, "b511") == "b"
    assert before == Cards.read
