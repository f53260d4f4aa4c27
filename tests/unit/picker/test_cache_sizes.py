"""The picker's mirrors follow what the servers' pages say of their caches."""

from epp.base.types import EndpointMetrics, EndpointName
from tests.invariants.picker import check_picker
from tests.unit.picker.picker_questions import a_picker, ask, endpoints, serve, text

A = EndpointName("a")


def test_a_wiped_cache_is_noticed_by_hits_that_stand_still() -> None:
    """Twelve prompts come in turn, one a second. The server empties its cache after a minute."""
    picker, held, hits, wrong = a_picker(on=endpoints("a")), set[str](), 0.0, 0
    for second in range(84):
        if second == 60:
            held.clear()
        name = f"p{second % 12}"
        pick = serve(picker, ask(text(name)), now=float(second))
        wrong += bool(pick.decision.matched_tokens) and name not in held
        hits += 2000.0 * (name in held)
        held.add(name)
        page = EndpointMetrics(scraped_at=second + 0.6, waiting=0, prefix_hits=hits)
        picker.news.observe(A, page, now=second + 0.6)
        assert second >= 60 or not wrong
    assert 0 < wrong <= 8
    check_picker(picker)


def test_a_server_that_falls_asleep_has_lost_its_cache() -> None:
    picker = a_picker(on=endpoints("a"))
    serve(picker, ask(text("p")), now=1.0)
    for at, asleep in ((2.0, True), (3.0, False)):
        picker.news.observe(A, EndpointMetrics(scraped_at=at, asleep=asleep), now=at)
    assert serve(picker, ask(text("p")), now=4.0).decision.matched_tokens == 0
