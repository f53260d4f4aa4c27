"""Requests of clients can neither make the picker eject a healthy server nor bring a sick server back."""

import pytest

from epp.base.types import ApiKind, EndpointMetrics, EndpointName, InferenceRequest
from epp.config.policy import PolicySpec, Sampling
from epp.picker.decision import Question
from epp.picker.endpoints.marks import Verdict
from epp.picker.events import Pick
from epp.picker.picker import Picker
from epp.request.parse import parse_request, skim_request
from epp.request.response import NO_CONTENT, PARTIAL, ResponseFeedback
from epp.sources.scraping.metrics_page import parse_page
from tests.unit.picker.picker_questions import a_picker, endpoints, state, text

HEALTH = Question("r", InferenceRequest(kind=ApiKind.OTHER), path_hash=1)
MISSING = Question("r", InferenceRequest(kind=ApiKind.OTHER), path_hash=2)


def chat_to_path(*, path_hash: int, name: str = "a", stream: bool = True) -> Question:
    prompt = text(name)
    inference = InferenceRequest(kind=ApiKind.CHAT, model="m", prompt=prompt, stream=stream)
    return Question("r", inference, body_bytes=len(prompt), path_hash=path_hash)


def sent_to(server: str, request: Question, picker: Picker, *, now: float) -> Pick:
    """Send one request to a certain server."""
    subset = frozenset({state(picker, server).endpoint.address})
    one = Question("r", request.inference, request.body_bytes, subset, path_hash=request.path_hash)
    return picker.pick(one, now=now)


def answer_at(
    server: str, request: Question, picker: Picker, *, status: int = 200, shows: int | None = None, now: float
) -> Pick:
    """Send one request to a certain server, which answers at once. shows: the answer is read, and its body
    shows this status.
    """
    pick = sent_to(server, request, picker, now=now)
    picker.on_response_headers(pick, status=status, served=pick.destinations[0], now=now)
    picker.on_feedback(pick, ResponseFeedback(status=shows), now=now)
    picker.end(pick, outcome="ended", now=now)
    return pick


@pytest.mark.parametrize("read_there", [200, None])
def test_bare_answers_count_only_beside_answers_with_tokens(read_there: int | None) -> None:
    """None: no token is read anywhere, because a gateway drops the bodies. OPTIONS shows nothing."""
    picker = a_picker(on=endpoints("ab"))
    answer_at("b", chat_to_path(path_hash=1), picker, shows=read_there, now=0.0)
    options = Question("r", InferenceRequest(kind=ApiKind.CHAT), path_hash=1)
    for _ in range(8 if read_there else 0):
        answer_at("b", options, picker, shows=PARTIAL, now=0.5)
    for n in range(5):
        answer_at("a", chat_to_path(path_hash=1), picker, shows=PARTIAL, now=1.0 + n)
    assert [each.endpoint.name for each in picker.news.ejected(now=6.0)] == (["a"] if read_there else [])


@pytest.mark.parametrize("shows", [NO_CONTENT, 500])
def test_of_each_server_at_most_eight_answers_are_read_in_a_second(shows: int) -> None:
    """Clients ask for nothing but answers that show no token, or an error, at every server."""
    picker = a_picker(PolicySpec(sampling=Sampling(share=1e-9)), on=endpoints("ab"))
    request = chat_to_path(path_hash=1)
    for name in "ab":
        picks = [answer_at(name, request, picker, shows=shows, now=n / 50) for n in range(100)]
        assert 8 <= sum(pick.sampled for pick in picks) <= 3 * 8


def price(picker: Picker, server: str) -> float:
    """Return the seconds that the server's failures add to its score for a request for the model."""
    pick = picker.pick(chat_to_path(path_hash=1), now=1.0)
    picker.end(pick, outcome="aborted", now=1.0)
    found = next(each for each in pick.decision.candidates if each.name == server)
    return found.parts_s["failing"]


STORED = b'{"model":"m","input":"go on","previous_response_id":"resp_1"}'
UNREAD = skim_request("/v1/responses", STORED, unread="overload")


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (chat_to_path(path_hash=2), 404),
        (MISSING, 404),
        (Question("r", parse_request("/v1/responses", STORED), len(STORED), path_hash=1), 404),
        (Question("r", UNREAD, len(STORED), path_hash=1), 404),
        (chat_to_path(path_hash=1), 501),
    ],
    ids=["a path that nobody answered", "no model", "stored response", "unread body", "API of no model"],
)
def test_an_answer_that_is_the_clients_fault_makes_no_server_dearer(bad: Question, status: int) -> None:
    picker = a_picker(on=endpoints("ab"))
    for well in (chat_to_path(path_hash=1), HEALTH):
        answer_at("a", well, picker, now=1.0)
    if bad is MISSING:
        answer_at("a", bad, picker, now=1.0)
    for _ in range(8):
        answer_at("b", bad, picker, status=status, now=1.0)
    assert price(picker, "b") == 0.0
    answer_at("b", chat_to_path(path_hash=1), picker, status=404, now=1.0)
    assert price(picker, "b") > 0.0, "another server has just answered this"


def test_health_checks_of_a_load_balancer_bring_no_sick_server_back() -> None:
    picker = a_picker(on=endpoints("ab"))
    for _ in range(6):
        answer_at("b", chat_to_path(path_hash=1), picker, status=500, now=1.0)
    assert picker.news.ejected(now=1.0)
    before = price(picker, "b")
    for _ in range(6):
        answer_at("b", HEALTH, picker, now=1.0)
    picker.housekeep(now=3.0)
    assert picker.news.ejected(now=3.0)
    assert price(picker, "b") == before
    for _ in range(3):
        answer_at("b", chat_to_path(path_hash=1), picker, now=1.0)
    assert not picker.news.ejected(now=1.0)


@pytest.mark.parametrize("stands_still", [False, True])
def test_answers_that_are_not_streamed_take_as_long_as_the_server_computes(*, stands_still: bool) -> None:
    """One server has two long answers, and the other has short ones at the same time."""
    picker = a_picker(on=endpoints("ab"))
    counted = dict.fromkeys("ab", 1.0)

    def scrape(now: float) -> None:
        for name in "ab":
            page = EndpointMetrics(scraped_at=now, running=0, generated_tokens=counted[name])
            picker.news.observe(EndpointName(name), page, now=now)

    scrape(0.0)
    busy, other = "a", "b"
    for _ in range(2):
        sent_to(busy, chat_to_path(path_hash=1, stream=False), picker, now=0.1)
    for tenth in range(1, 100):
        now = tenth / 10
        answer_at(other, chat_to_path(path_hash=1, name=f"{tenth}", stream=False), picker, now=now)
        if tenth % 10 == 5:
            counted[other] += 10.0
            counted[busy] += 0.0 if stands_still else 50.0
            scrape(now)
        picker.housekeep(now=now)
        assert stands_still or not picker.news.ejected(now=now)
    assert bool(picker.news.ejected(now=10.0)) is stands_still


@pytest.mark.parametrize("counts", [True, False])
def test_an_unread_short_answer_counts_once_the_next_page_shows_its_tokens(*, counts: bool) -> None:
    picker = a_picker(PolicySpec(sampling=Sampling(share=0.0)), on=endpoints("ab"))
    for name in "ab":
        page = EndpointMetrics(scraped_at=0.0, generated_tokens=1.0, finished=1.0, ttft_count=1.0)
        picker.news.observe(EndpointName(name), page, now=0.0)
    pick = sent_to("a", chat_to_path(path_hash=1), picker, now=5.0)
    picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=5.1)
    picker.end(pick, outcome="ended", now=5.11)
    assert not picker.caches.table.match(pick.prompt.chain)
    after = 2.0 if counts else 1.0
    page = EndpointMetrics(scraped_at=6.0, generated_tokens=after, finished=after, ttft_count=after)
    picker.news.observe(EndpointName("a"), page, now=6.0)
    assert bool(picker.caches.table.match(pick.prompt.chain)) is counts
    assert bool(picker.fleet.failures.probes_due(now=6.0)) is not counts
    assert state(picker, "a").backlog.unbegun == (0 if counts else 2), "the probe has no booking"


def test_health_checks_are_no_complete_answers_of_a_server_that_cuts() -> None:
    picker = a_picker(on=endpoints("ab"))
    for _ in range(6):
        picker.news.answer_cut(state(picker, "b").endpoint.address, now=1.0)
    for _ in range(6):
        answer_at("b", HEALTH, picker, now=1.0)
    picker.housekeep(now=4.0)
    assert picker.news.ejected(now=4.0)


def uncounted_page(waiting: int | None, *, finished: int, now: float) -> EndpointMetrics:
    """Return a page without counters, or one of SGLang, whose counters grow only when an answer ends."""
    if waiting is None:
        return EndpointMetrics(scraped_at=now, running=1)
    page = (
        f"sglang:num_running_reqs 1\nsglang:num_queue_reqs {waiting}\n"
        f"sglang:generation_tokens_total {finished}\nsglang:num_requests_total {finished}\n"
    )
    return parse_page(page.encode(), scraped_at=now)


@pytest.mark.parametrize("waiting", [None, 0, 5])
@pytest.mark.parametrize("verdict", ["well", "ill"])
def test_a_probe_tells_a_long_answer_from_a_hang_where_no_counter_does(
    verdict: Verdict, waiting: int | None
) -> None:
    """One server has ten long answers that are not streamed, the other has short ones. While requests wait at
    SGLang, the probe waits too.
    """
    picker = a_picker(on=endpoints("ab"))
    finished = dict.fromkeys("ab", 1)
    busy = other = ""
    probes: list[bool] = []
    for tenth in range(100):
        now = tenth / 10
        for name in "ab":
            page = uncounted_page(waiting, finished=finished[name], now=now)
            picker.news.observe(EndpointName(name), page, now=now)
        if tenth < 10:
            pick = picker.pick(chat_to_path(path_hash=1, stream=False), now=now)
            busy = busy or pick.decision.chosen
            other = "ab".replace(busy, "")
        else:
            answer_at(other, chat_to_path(path_hash=1, name=f"{tenth}", stream=False), picker, now=now)
            finished[other] += 1
        picker.housekeep(now=now)
        for probe in picker.fleet.failures.probes_due(now=now):
            assert probe.state.endpoint.name == busy
            probes.append(probe.queued)
            found: Verdict = "unclear" if verdict == "ill" and probe.queued else verdict
            picker.fleet.failures.probed(probe, found, now=now)
    assert set(probes) == {bool(waiting)}
    assert bool(picker.news.ejected(now=10.0)) is (verdict == "ill" and not waiting)


@pytest.mark.parametrize(
    ("verdicts", "out"),
    [(["well"], ["a"]), (["unclear", "ill", "well"], ["a"]), (["refused"], []), ([], [])],
)
def test_a_probe_of_another_server_tells_if_refusals_are_a_fault(
    verdicts: list[Verdict], out: list[str]
) -> None:
    """One server answered last, and then refuses requests and probes. `verdicts` are those of the other
    server, in order. None: it leaves before it is asked.
    """
    picker, left = a_picker(on=endpoints("ab")), list(verdicts)
    for name in ("b", "a"):
        answer_at(name, chat_to_path(path_hash=1), picker, now=1.0)
    for _ in range(3):
        answer_at("a", chat_to_path(path_hash=1), picker, status=401, now=1.0)
    picker.news.set_endpoints(endpoints("ab" if verdicts else "a"), now=1.0)
    for tenth in range(10, 40):
        for probe in picker.fleet.failures.probes_due(now=tenth / 10):
            asked = probe.state.endpoint.name
            picker.fleet.failures.probed(probe, "refused" if asked == "a" else left.pop(0), now=tenth / 10)
    assert not left
    assert [each.endpoint.name for each in picker.news.ejected(now=4.0)] == out
