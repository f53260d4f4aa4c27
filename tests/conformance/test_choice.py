"""Rows 3, 4, 5, 10, 11, 16 and 18: which endpoint is named, from which set, and in what form."""

from __future__ import annotations

import ipaddress
import json
from typing import Any

import pytest

from epp.tools.conformance.dataplane import BUFFERED, DESTINATION, DUPLEX, LB, Mode
from tests.conformance.modes import EARLY, MODES, NONE, STREAMED
from tests.conformance.picker import OwnPicker, PickerUnderTest

pytestmark = pytest.mark.asyncio(loop_scope="module")

every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
BODY = json.dumps({"model": "m", "prompt": "hello " * 100}).encode()
SELECTION = "test-epp-endpoint-selection"
SCORES = f"{DESTINATION}-scores"
NOWHERE = ["203.0.113.7:8000", "[2001:db8::7]:8000"]


def with_and_without_body() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("body", [BODY, None], ids=["body", "body-less"])


# -- row 3 ---------------------------------------------------------------------------------------------------


@every_mode
@with_and_without_body()
async def test_row_03_a_subset_list_binds(picker: PickerUnderTest, mode: Mode, body: bytes | None) -> None:
    """The data plane may send a list of the endpoints that are allowed. The pick and its fallbacks are among
    them.
    """
    for allowed in (picker.endpoints[:1], picker.endpoints[1:]):
        routed = await picker.route(mode, body, subset=list(allowed))
        assert set(routed.destinations) <= set(allowed)


@with_and_without_body()
@pytest.mark.parametrize("separator", [",", ", "])
async def test_row_03_a_subset_in_one_comma_string_binds(
    picker: PickerUnderTest, body: bytes | None, separator: str
) -> None:
    """The same hint comes as one text with commas, which some data planes send."""
    for allowed in (picker.endpoints[:2], picker.endpoints[-1:]):
        routed = await picker.route(BUFFERED, body, subset=separator.join(allowed))
        assert set(routed.destinations) <= set(allowed)


async def test_row_03_the_port_counts(picker: PickerUnderTest) -> None:
    """Servers on one address differ by port. A port where no server listens matches none of them."""
    hosts = [endpoint.rpartition(":")[0] for endpoint in picker.endpoints]
    for endpoint, host in zip(picker.endpoints, hosts, strict=True):
        routed = await picker.route(BUFFERED, BODY, subset=[endpoint])
        assert routed.destinations == [endpoint]
        if f"{host}:1" not in picker.endpoints:
            assert (await picker.route(BUFFERED, BODY, subset=[f"{host}:1"])).refused.status == 503


async def test_row_03_ipv6_addresses_match_in_brackets(picker: PickerUnderTest) -> None:
    """The hint and the answer write an IPv6 endpoint in brackets. The picker finds the endpoint in every
    spelling.
    """
    ipv6 = [endpoint for endpoint in picker.endpoints if endpoint.startswith("[")]
    if not ipv6:
        pytest.skip("none of --picker-endpoints is IPv6")
    host, _, port = ipv6[0].rpartition(":")
    long = f"[{ipaddress.ip_address(host[1:-1]).exploded}]:{port}"
    for spelling in (ipv6[0], long, long.upper()):
        routed = await picker.route(BUFFERED, BODY, subset=[spelling])
        assert routed.destinations == ipv6[:1]


async def test_row_03_unknown_entries_are_passed_over(picker: PickerUnderTest) -> None:
    """Entries that name none of our endpoints take nothing from the other entries."""
    wanted = picker.endpoints[0]
    routed = await picker.route(BUFFERED, BODY, subset=[NOWHERE[0], "no address", "", wanted])
    assert routed.destinations == [wanted]


@every_mode
@with_and_without_body()
@pytest.mark.parametrize("subset", [NOWHERE, ",".join(NOWHERE), []], ids=["list", "text", "empty"])
async def test_row_03_no_eligible_endpoint_is_503(
    picker: PickerUnderTest, mode: Mode, body: bytes | None, subset: Any
) -> None:
    """The picker never chooses an endpoint outside the hint, even if the hint leaves none: then the client
    gets 503.
    """
    async with picker.exchange(mode) as exchange:
        await exchange.send(body, subset=subset)
        assert exchange.refused.status == 503


# -- rows 4 and 5 --------------------------------------------------------------------------------------------


@every_mode
@with_and_without_body()
async def test_row_04_header_and_metadata_say_the_same(
    picker: PickerUnderTest, mode: Mode, body: bytes | None
) -> None:
    """Some data planes read the header and others the metadata. The pick is in the request header and in the
    dynamic metadata, and both are equal.
    """
    routed = await picker.route(mode, body)
    assert routed.metadata_destination == routed.destination


async def test_row_04_one_answer_carries_both(picker: PickerUnderTest) -> None:
    """Header and metadata come in one message, so that no data plane acts on half a pick.
    No other namespace is set."""
    routed = await picker.route(DUPLEX, BODY)
    assert list(routed.metadata) == [LB]
    assert routed.carriers == 1


@every_mode
@with_and_without_body()
async def test_row_05_the_pick_is_a_list_of_different_endpoints(
    picker: PickerUnderTest, mode: Mode, body: bytes | None
) -> None:
    """The pick is an ordered list of `ip:port` with commas. It names no endpoint twice, and more than one
    endpoint if there are more.
    """
    routed = await picker.route(mode, body)
    assert len(routed.destinations) >= 2
    assert len(set(routed.destinations)) == len(routed.destinations)
    assert set(routed.destinations) <= set(picker.endpoints)


async def test_row_05_fallbacks_stay_within_the_subset(picker: PickerUnderTest) -> None:
    """A fallback is a pick too: if two endpoints are allowed the pick has both, if one is allowed it
    has one.
    """
    two = list(picker.endpoints[:2])
    assert sorted((await picker.route(BUFFERED, BODY, subset=two)).destinations) == sorted(two)
    assert (await picker.route(BUFFERED, BODY, subset=two[1:])).destinations == two[1:]


# -- row 10 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [BUFFERED, EARLY, DUPLEX, NONE], ids=["buffered", "early", "duplex", "none"])
@with_and_without_body()
async def test_row_10_the_test_header_steers_the_pick(
    flagged: PickerUnderTest, mode: Mode, body: bytes | None
) -> None:
    """With the flag on, a conformance test names the endpoint that it wants, or several in order."""
    flagged.needs("conformance-headers")
    for wanted in (list(flagged.endpoints[:1]), list(flagged.endpoints[1::-1])):
        routed = await flagged.route(mode, body, headers=[(SELECTION, ",".join(wanted))])
        assert routed.destinations == wanted
        assert routed.metadata_destination == ",".join(wanted)


async def test_row_10_an_address_without_port_names_the_endpoint_there(flagged: PickerUnderTest) -> None:
    """Test suites know pods by address alone: the address means every endpoint on it."""
    flagged.needs("conformance-headers")
    host = flagged.endpoints[-1].rpartition(":")[0]
    routed = await flagged.route(BUFFERED, BODY, headers=[(SELECTION, host)])
    assert {d.rpartition(":")[0] for d in routed.destinations} == {host}


async def test_row_10_a_test_endpoint_that_does_not_exist_is_503(flagged: PickerUnderTest) -> None:
    """A test that names an endpoint which does not exist gets an error and no other endpoint."""
    flagged.needs("conformance-headers")
    async with flagged.exchange() as exchange:
        await exchange.send(BODY, headers=[(SELECTION, NOWHERE[0])])
        assert exchange.refused.status == 503


@pytest.mark.parametrize("attribute", [False, True], ids=["metadata", "attribute"])
async def test_row_10_the_answer_reports_who_served(flagged: PickerUnderTest, *, attribute: bool) -> None:
    """With the flag on, the client's answer carries the server that the data plane says served it."""
    flagged.needs("conformance-headers")
    if attribute and not isinstance(flagged, OwnPicker):
        pytest.skip("the attribute is Envoy's, which another picker need not read")
    served = flagged.endpoints[1]
    async with flagged.exchange() as exchange:
        await exchange.send(BODY)
        await exchange.respond(served=served, attribute=attribute)
        assert exchange.response.values("x-conformance-test-served-endpoint") == [served]


async def test_row_10_without_the_flag_the_test_headers_mean_nothing(picker: PickerUnderTest) -> None:
    """A client of a picker in use can neither choose its server nor learn which server served."""
    picker.needs("conformance-headers", on=False)
    for wanted in (*picker.endpoints, NOWHERE[0]):
        async with picker.exchange() as exchange:
            await exchange.send(BODY, headers=[(SELECTION, wanted)])
            assert len(exchange.destinations) >= 2
            await exchange.respond(served=picker.endpoints[0])
            assert exchange.response.values("x-conformance-test-served-endpoint") == []
    # The same prompt goes to the server that knows it already, whatever the header says.
    home = (await picker.route(BUFFERED, BODY, subset=[picker.endpoints[0]])).destination
    named = await picker.route(STREAMED, BODY, headers=[(SELECTION, NOWHERE[0])])
    assert home != NOWHERE[0]
    assert NOWHERE[0] not in named.destinations


async def test_row_15_the_values_of_a_repeated_header_are_one_list(flagged: PickerUnderTest) -> None:
    """A header that comes twice counts as a list of its values in their order. Upper and lower case in names
    are the same.
    """
    flagged.needs("conformance-headers")
    first, second = flagged.endpoints[1], flagged.endpoints[0]
    headers = [(SELECTION, first), ("Test-EPP-Endpoint-Selection", second)]
    assert (await flagged.route(BUFFERED, BODY, headers=headers)).destinations == [first, second]


# -- row 11 --------------------------------------------------------------------------------------------------


@every_mode
@with_and_without_body()
@pytest.mark.parametrize("name", [DESTINATION, DESTINATION.title()])
async def test_row_11_a_destination_that_the_client_sends_is_gone(
    picker: PickerUnderTest, mode: Mode, body: bytes | None, name: str
) -> None:
    """Even if a client sends the destination header, once or twice, the header then holds only the pick."""
    claims = [(name, NOWHERE[0]), (name, f"{NOWHERE[1]},{picker.endpoints[0]}")]
    routed = await picker.route(mode, body, headers=claims)
    assert routed.destination == routed.metadata_destination
    assert set(routed.destinations) <= set(picker.endpoints)


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX], ids=["buffered", "full_duplex"])
async def test_row_11_a_refused_request_gets_no_destination(picker: PickerUnderTest, mode: Mode) -> None:
    """A destination that the client names does not save a request that the picker refuses."""
    async with picker.exchange(mode) as exchange:
        await exchange.send(BODY, subset=NOWHERE, headers=[(DESTINATION, picker.endpoints[0])])
        assert exchange.refused.status == 503
        assert LB not in exchange.metadata


# -- row 16 --------------------------------------------------------------------------------------------------


@every_mode
@with_and_without_body()
async def test_row_16_a_request_id_is_kept_or_made(
    picker: PickerUnderTest, mode: Mode, body: bytes | None
) -> None:
    """The picker keeps the caller's id as it came. A request without an id gets a new one, and no two
    requests get the same.
    """
    kept = await picker.route(mode, body, headers=[("x-request-id", "from-the-caller")])
    assert kept.request.values("x-request-id") == ["from-the-caller"]
    made = [(await picker.route(mode, body)).request.values("x-request-id") for _ in range(2)]
    assert [len(values) for values in made] == [1, 1]
    assert made[0] != made[1]


async def test_row_16_the_decision_is_found_by_the_request_id(ours: OwnPicker) -> None:
    """The decision about a request can be looked up by the request's id, which the caller sent or the picker
    made.
    """
    kept = await ours.route(BUFFERED, BODY, headers=[("X-Request-ID", "why-there")])
    made = await ours.route(DUPLEX, BODY)
    for routed, wanted in ((kept, "why-there"), (made, made.request.values("x-request-id")[0])):
        decision = await ours.admin(f"/decisions/{wanted}")
        assert decision["request_id"] == wanted
        assert decision["destinations"] == routed.destinations
        assert decision["reason"]


async def test_row_15_the_status_is_read_under_its_real_name(ours: OwnPicker) -> None:
    """The server's status is the pseudo header `:status`. A header named `status` is just another header."""
    async with ours.exchange() as exchange:
        await exchange.send(BODY, headers=[("x-request-id", "status-read")])
        await exchange.respond(status=418, headers=[("status", "200")])
        await exchange.finish()
    assert (await ours.admin("/decisions/status-read"))["status"] == 418


# -- row 18 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX, NONE], ids=["buffered", "full_duplex", "none"])
async def test_row_18_the_metadata_has_scores_if_the_flag_is_on(flagged: PickerUnderTest, mode: Mode) -> None:
    """With its flag on, the metadata holds a number for the endpoints that were considered,
    by their ip:port."""
    flagged.needs("scores")
    routed = await flagged.route(mode, BODY)
    scores = routed.metadata[LB][SCORES]
    assert set(routed.destinations) <= set(scores) <= set(flagged.endpoints)
    assert all(isinstance(score, (int, float)) for score in scores.values())


async def test_row_18_without_the_flag_there_are_no_scores(picker: PickerUnderTest) -> None:
    """Without the flag the picker does not compute scores."""
    picker.needs("scores", on=False)
    assert list((await picker.route(BUFFERED, BODY)).metadata[LB]) == [DESTINATION]
