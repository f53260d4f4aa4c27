"""A picker that has too much to do picks by load alone. The pick is booked like any other."""

from collections import Counter

import msgspec

from epp.base.types import ApiKind, InferenceRequest
from epp.picker.decision import Question
from epp.picker.events import Pick
from tests.invariants.picker import check_picker
from tests.unit.picker.picker_questions import a_picker, ask, endpoints, in_flight, serve, text

UNREAD = InferenceRequest(kind=ApiKind.OTHER, unread="overload")


def overload(number: int) -> Question:
    return Question(request_id=str(number), inference=UNREAD, body_bytes=4_000, overload=True)


def test_an_unread_request_is_routed_by_load_and_booked_until_it_is_let_go() -> None:
    picker = a_picker(on=endpoints("abcd"))
    picks = [picker.pick(overload(n), now=n / 1000) for n in range(400)]
    assert all(80 <= count <= 120 for count in in_flight(picker).values())
    assert all(len(set(pick.destinations)) == 3 for pick in picks)
    for pick in picks:
        picker.detach(pick, now=1.0)
    assert not any(in_flight(picker).values())
    check_picker(picker)


def test_the_record_says_why_nothing_was_read() -> None:
    picker = a_picker(on=endpoints("ab"))
    decision = picker.pick(overload(1), now=0.0).decision
    assert (decision.reason, decision.unread, decision.matched_tokens) == ("overload", "overload", 0)
    assert decision.prompt_tokens > 0
    assert not decision.candidates


def test_a_server_whose_answers_fail_is_named_last() -> None:
    picker = a_picker(on=endpoints("abc"))
    for n in range(60):
        request = ask(text(f"p{n}"))
        pick: Pick = picker.pick(request, now=n / 100)
        picker.on_response_headers(
            pick, status=500 if pick.decision.chosen == "a" else 200, served=None, now=n / 100
        )
        picker.end(pick, outcome="ended", now=n / 100)
    chosen = Counter(picker.pick(overload(n), now=0.6).decision.chosen for n in range(100))
    assert all(name != "a" for name in chosen)
    check_picker(picker)


def test_only_servers_of_its_model_are_asked() -> None:
    picker = a_picker(on=[*endpoints("a", model="m"), *endpoints("b", model="n")])
    request = msgspec.structs.replace(overload(1), inference=msgspec.structs.replace(UNREAD, model="n"))
    assert picker.pick(request, now=0.0).decision.chosen == "b"
    assert not picker.news.one_model


def test_a_conformance_run_names_the_server_although_there_is_no_time() -> None:
    picker = a_picker(on=endpoints("abcd"))
    named = next(each.address for each in picker.news.endpoints() if each.name == "c")
    for n in range(20):
        pick = picker.pick(msgspec.structs.replace(overload(n), prescribed=(named,)), now=n / 1000)
        assert (pick.decision.chosen, pick.decision.reason) == ("c", "prescribed")
        assert len(pick.destinations) == 1


def test_prefixes_are_neither_read_nor_recorded() -> None:
    picker = a_picker(on=endpoints("ab"))
    serve(picker, ask(text("long")), now=0.0)
    before = picker.caches.table.entries
    picker.pick(overload(1), now=0.1)
    assert picker.caches.table.entries == before
