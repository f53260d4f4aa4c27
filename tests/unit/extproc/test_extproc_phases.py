"""The table of phases: each phase can be reached and leads to the end."""

from __future__ import annotations

from epp.extproc.events import RequestBody, ResponseHeaders
from epp.extproc.phases import FOLLOWS, Phase
from tests.unit.extproc.stream_bench import BODY, BUFFERED, OK, Bench, head, run, through


def test_every_phase_comes_after_the_first_and_leads_to_the_last() -> None:
    assert FOLLOWS.keys() == set(Phase)
    assert set().union(*FOLLOWS.values()) == set(Phase) - {Phase.START}
    assert [phase for phase, after in FOLLOWS.items() if not after] == [Phase.CLOSED]
    assert all(Phase.CLOSED in after for phase, after in FOLLOWS.items() if phase is not Phase.CLOSED)


def test_a_stream_goes_through_its_phases() -> None:
    bench = Bench()
    stream = through(bench, BUFFERED)
    phases = [bench.stream().phase, stream.phase]
    stream.receive(ResponseHeaders(OK, end_of_stream=True), now=1.0)
    phases.append(stream.phase)
    stream.close(now=2.0)
    assert [*phases, stream.phase] == [Phase.START, Phase.PICKED, Phase.DONE, Phase.CLOSED]


def test_a_request_whose_answer_began_before_its_pick_is_never_picked() -> None:
    bench = Bench()
    stream = bench.stream()
    run(stream, head(BUFFERED), ResponseHeaders(OK))
    assert stream.phase is Phase.ANSWERED
    run(stream, RequestBody(BODY, end_of_stream=True))
    assert (stream.phase, stream.pick, bench.in_flight()) == (Phase.ANSWERED, None, 0)
