"""Which servers are asked for a model. The source declares models, and servers list models themselves."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from epp.base.errors import NoEndpointError, UnknownModelError
from epp.base.types import Endpoint, EndpointMetrics, EndpointName, ModelCard, ModelList
from epp.config.policy import PolicySpec
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.fleet import Fleet
from tests.invariants.fleet import check_fleet
from tests.unit.picker.endpoints.fleets import state_of
from tests.unit.picker.endpoints.lettered import endpoint

SPEC = PolicySpec()


def listing(*bases: str, adapters: Sequence[str] = ()) -> ModelList:
    return ModelList(
        (*(ModelCard(name) for name in bases), *(ModelCard(name, parent=bases[0]) for name in adapters))
    )


def fleet_of(names: str, *, refuses: bool = True, **lists: ModelList | None) -> Fleet:
    fleet = Fleet(SPEC, refuses_unknown_models=refuses)
    fleet.set_endpoints([endpoint(name) for name in names], now=0.0)
    take(fleet, **lists)
    return fleet


def pools_of(**pools: str) -> Fleet:
    """Return the names of the endpoints of each pool."""
    fleet = Fleet(SPEC)
    endpoints = [endpoint(name, pool=pool) for pool, names in pools.items() for name in names]
    fleet.set_endpoints(endpoints, now=0.0)
    return fleet


def take(fleet: Fleet, **lists: ModelList | None) -> Sequence[str]:
    restarted = fleet.take_lists({EndpointName(name): listed for name, listed in lists.items()}, now=1.0)
    check_fleet(fleet)
    return restarted


def names_that_serve(fleet: Fleet, model: str) -> str:
    return "".join(sorted(fleet.in_slot(slot).endpoint.name for slot in fleet.served.slots(model)))


def picked_from(fleet: Fleet, model: str, subset: str) -> str:
    allowed = {endpoint(name).address for name in subset}
    slots = fleet.candidates(model, subset=allowed)
    return "".join(sorted(fleet.in_slot(slot).endpoint.name for slot in slots))


def test_the_length_that_a_server_lists_is_known_to_its_state() -> None:
    cards = (ModelCard("m", max_model_len=8192), ModelCard("sql", parent="m"))
    states = {state.endpoint.name: state for state in fleet_of("ab", a=ModelList(cards), b=None).states()}
    assert (states[EndpointName("a")].max_model_len, states[EndpointName("b")].max_model_len) == (8192, None)


def test_a_model_goes_to_the_servers_that_list_it() -> None:
    fleet = fleet_of("abc", a=listing("m"), b=listing("n", adapters=["sql"]), c=listing("n", "alias"))
    assert [names_that_serve(fleet, model) for model in ("m", "n", "sql", "alias")] == ["a", "bc", "b", "c"]
    assert [fleet.served.adapter(model) for model in ("m", "n", "sql", "alias")] == ["", "", "sql", ""]
    assert not fleet.served.one_model


def test_unknown_model_is_an_error_once_every_server_has_listed_its_models() -> None:
    fleet = fleet_of("abc", a=listing("m"), b=listing("n"), c=None)
    assert names_that_serve(fleet, "ghost") == "c", "only this server may have the model"
    assert names_that_serve(fleet, "m") == "a"
    take(fleet, c=listing("n"))
    with pytest.raises(UnknownModelError, match="'ghost' does not exist") as raised:
        fleet.served.slots("ghost")
    assert (raised.value.status, raised.value.reason) == (404, "model_not_found")
    assert fleet.served.unknown_asked == 1
    assert names_that_serve(fleet, "m") == "a"


def test_unknown_models_go_to_any_server_if_they_are_not_refused() -> None:
    fleet = fleet_of("ab", refuses=False, a=listing("m"), b=listing("n"))
    assert names_that_serve(fleet, "ghost") == "ab"
    assert names_that_serve(fleet, "n") == "b"


def test_a_server_without_a_list_gets_no_request_for_a_model_of_others() -> None:
    fleet = pools_of(llama="ab", mistral="cd")
    take(fleet, a=listing("llama"), b=None, c=listing("mistral"), d=None)
    assert [names_that_serve(fleet, model) for model in ("llama", "mistral")] == ["a", "c"]
    assert names_that_serve(fleet, "ghost") == "bd", "nobody lists the model, and one of these may have it"


def observe(fleet: Fleet, name: str, **page: Any) -> EndpointState:
    state = state_of(fleet, name)
    state.take_page(EndpointMetrics(scraped_at=1.0, running=0, waiting=0, **page), now=1.0)
    return state


def test_names_on_a_page_stand_for_a_list_that_the_server_does_not_give() -> None:
    fleet = fleet_of("abc", a=listing("m", "alias"), c=listing("n"))
    state = observe(fleet, "b", models=frozenset({"m"}))
    take(fleet, b=None)
    assert [names_that_serve(fleet, model) for model in ("m", "alias", "ghost")] == ["ab", "a", "b"]
    assert (state.model, len(fleet.served.unlisted)) == ("m", 1), "so no model is unknown"
    assert "ghost" not in str(fleet.served.model_list())
    take(fleet, b=listing("n"))
    assert [names_that_serve(fleet, model) for model in ("m", "n")] == ["a", "bc"]
    take(fleet, b=None)
    assert names_that_serve(fleet, "n") == "bc", "a list stays while its server cannot be asked"


def test_names_on_pages_exclude_no_server_whose_page_has_not_come() -> None:
    fleet = fleet_of("abc")
    observe(fleet, "a", models=frozenset({"m"}))
    take(fleet, a=None, b=None)
    assert [names_that_serve(fleet, model) for model in ("m", "ghost")] == ["abc", "abc"]
    observe(fleet, "b", models=frozenset({"n"}))
    take(fleet, b=None)
    assert names_that_serve(fleet, "m") == "ac"


def test_a_page_without_names_changes_nothing() -> None:
    fleet = fleet_of("ab", a=listing("m"))
    observe(fleet, "b")
    take(fleet, b=None)
    assert names_that_serve(fleet, "m") == "a"


def test_a_server_that_sleeps_gets_no_requests_until_it_wakes() -> None:
    fleet = fleet_of("ab", a=listing("m"), b=listing("m"))
    observe(fleet, "a", asleep=True)
    assert picked_from(fleet, "m", "ab") == "b"
    observe(fleet, "b", asleep=True)
    with pytest.raises(NoEndpointError, match="sleep"):
        picked_from(fleet, "m", "ab")
    observe(fleet, "a")
    assert picked_from(fleet, "m", "ab") == "a"
    check_fleet(fleet)


def test_a_long_prompt_goes_to_a_server_that_lists_the_length() -> None:
    short, long = (ModelList((ModelCard("m", max_model_len=length),)) for length in (8192, 32768))
    fleet = fleet_of("abc", a=short, b=long, c=short)
    slots = fleet.candidates("m", subset=None)
    assert [list(fleet.served.fitting(slots, tokens=tokens)) for tokens in (8192, 8193, 32769)] == [
        [0, 1, 2], [1], [0, 1, 2],
    ]  # fmt: skip
    take(fleet, b=short)
    assert fleet.served.fitting(slots, tokens=10_000) is slots, "all take the same"


def test_a_model_that_no_server_lists_goes_to_a_pool_without_any_list() -> None:
    fleet = pools_of(llama="ab", mistral="cd")
    assert names_that_serve(fleet, "mistral") == "abcd"
    take(fleet, a=listing("llama"), b=None)
    assert names_that_serve(fleet, "mistral") == "cd"
    assert names_that_serve(fleet, "llama") == "a"


def test_an_adapter_that_was_seen_on_a_page_stays_in_its_pool() -> None:
    fleet = pools_of(one="ab", two="c")
    take(fleet, a=listing("m"), b=listing("m"), c=listing("m"))
    observe(fleet, "a", active_adapters=frozenset({"fresh"}))
    assert names_that_serve(fleet, "fresh") == "ab"


def test_a_new_server_gets_no_model_of_others_until_it_lists_it() -> None:
    fleet = fleet_of("abcd", a=listing("m"), b=listing("n"))
    assert [names_that_serve(fleet, model) for model in ("m", "n", "ghost")] == ["a", "b", "cd"]
    take(fleet, c=listing("m"), d=listing("n"))
    assert [names_that_serve(fleet, model) for model in ("m", "n")] == ["ac", "bd"]
    anew = [endpoint(name) for name in "abd"]
    fleet.set_endpoints([*anew, endpoint("c", model="k")], now=2.0)
    fleet.set_endpoints([*anew, endpoint("c")], now=3.0)
    assert [names_that_serve(fleet, model) for model in ("m", "n")] == ["a", "bd"], (
        "this is another process than before"
    )


def with_endpoints(fleet: Fleet, *, existing: str, now: float, **pools: str) -> None:
    endpoints = [endpoint(name, pool=pool) for pool, names in pools.items() for name in names]
    fleet.set_endpoints(endpoints, now=now, pools=frozenset(existing))
    check_fleet(fleet)


def test_a_model_whose_pool_has_no_server_now_is_not_ready() -> None:
    fleet = Fleet(SPEC)
    with_endpoints(fleet, existing="pq", now=0.0, p="a", q="b")
    take(fleet, a=listing("m", adapters=["sql"]), b=listing("n"))
    with_endpoints(fleet, existing="pq", now=1.0, q="b")
    fleet.housekeep(now=10_000.0)
    for model in ("m", "sql"):
        with pytest.raises(NoEndpointError) as raised:
            fleet.served.slots(model)
        assert (raised.value.status, raised.value.reason) == (503, "no_ready_endpoint")
    assert json.loads(fleet.served.model_list() or b"")["data"][0]["id"] == "n"
    with_endpoints(fleet, existing="q", now=2.0, q="b")
    with pytest.raises(UnknownModelError):
        fleet.served.slots("m")


def test_a_model_whose_server_left_is_not_ready_then_unknown() -> None:
    fleet = Fleet(SPEC)
    with_endpoints(fleet, existing="p", now=0.0, p="ab")
    take(fleet, a=listing("m"), b=listing("n"))
    with_endpoints(fleet, existing="p", now=1.0, p="b")
    fleet.housekeep(now=300.0)
    with pytest.raises(NoEndpointError):
        fleet.served.slots("m")
    fleet.housekeep(now=301.0)
    with pytest.raises(UnknownModelError):
        fleet.served.slots("m")


def test_a_declared_model_goes_only_to_the_endpoints_that_declare_it() -> None:
    fleet = Fleet(SPEC)
    fleet.set_endpoints([endpoint("a", model="m"), endpoint("b")], now=0.0)
    assert names_that_serve(fleet, "m") == "a"
    take(fleet, a=listing("served-name"), b=None)
    assert names_that_serve(fleet, "m") == "a"
    assert names_that_serve(fleet, "served-name") == "a"


def test_within_a_subset_a_model_that_only_others_have_is_unknown() -> None:
    fleet = fleet_of("abc", a=listing("m"), b=listing("n"), c=None)
    assert picked_from(fleet, "m", "ab") == "a"
    with pytest.raises(UnknownModelError):
        picked_from(fleet, "m", "b")
    assert picked_from(fleet, "m", "bc") == "c", "the server's list is not known"
    with pytest.raises(NoEndpointError):
        picked_from(fleet, "m", "")


def test_servers_that_list_same_model_learn_together_and_others_separately() -> None:
    fleet = fleet_of("abc", a=listing("m"), b=listing("m"), c=listing("n"))
    a, b, c = (state.rate.model for state in fleet.states())
    assert a is b is not c
    assert list(fleet.columns.roster.models) == ["m", "m", "n"]


def test_a_server_that_lists_another_model_than_before_is_another_server() -> None:
    fleet = fleet_of("ab", a=listing("m"), b=listing("m"))
    state = state_of(fleet, "a")
    before = state.process
    assert take(fleet, a=listing("m", adapters=["sql"])) == []
    assert state.process == before
    assert take(fleet, a=listing("n")) == ["a"]
    assert (state.process, state.model) == (before + 1, "n")


def test_a_new_process_has_no_list_yet_and_other_servers_keep_theirs() -> None:
    fleet = fleet_of("ab", a=listing("m"), b=listing("n"))
    again = [endpoint("a"), Endpoint(EndpointName("b"), endpoint("b").address, incarnation="2")]
    fleet.set_endpoints(again, now=2.0)
    assert names_that_serve(fleet, "m") == "a"
    assert [names_that_serve(fleet, model) for model in ("n", "ghost")] == ["b", "b"], (
        "no other server has the model"
    )


def test_the_union_has_every_model_once_by_name() -> None:
    fleet = fleet_of("abc", a=listing("m", adapters=["sql"]), b=listing("m"), c=listing("b"))
    fleet.served.set_aliases({name: frozenset({"m"}) for name in ("m", "gpt")})
    listed = json.loads(fleet.served.model_list() or b"")
    assert listed["object"] == "list"
    assert [card["owned_by"] for card in listed["data"]] == ["", "prefix-gateway", "", ""]
    assert [(card["id"], card["parent"]) for card in listed["data"]] == [
        ("b", None), ("gpt", None), ("m", None), ("sql", "m"),
    ]  # fmt: skip
    assert set(listed["data"][0]) == {
        "id", "object", "created", "owned_by", "root", "parent", "max_model_len",
    }  # fmt: skip
    take(fleet, c=listing("z"))
    assert b'"id":"z"' in (fleet.served.model_list() or b""), "the list follows its servers"


def test_a_change_of_one_list_does_not_read_the_cards_of_the_others_again() -> None:
    class Cards(tuple[ModelCard, ...]):
        __slots__ = ()
        read = 0

        def __iter__(self) -> Iterator[ModelCard]:
            Cards.read += len(self)
            return super().__iter__()

    a, b, c = (ModelList(Cards(ModelCard(f"{name}{n}") for n in range(512))) for name in "abc")
    fleet = fleet_of("abc", a=a, b=b, c=c)
    assert names_that_serve(fleet, "b511") == "b"
    before = Cards.read
    assert before > 0
    take(fleet, a=listing("m"))
    assert names_that_serve(fleet, "b511") == "b"
    assert before == Cards.read
