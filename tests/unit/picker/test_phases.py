"""The phases of a request, and which phase may follow which."""

import pytest

from epp.picker.commit import enter
from epp.picker.events import OVER, Phase
from tests.unit.observe.telemetry.records import pick
from tests.unit.protocol.stream_bench import (
    BODY,
    BUFFERED,
    OK,
    Bench,
    head,
    request_body,
    response_headers,
    run,
    through,
)


@pytest.mark.parametrize("last", [phase for phase in Phase if phase in OVER])
def test_no_phase_follows_the_end(last: Phase) -> None:
    made = pick()
    enter(made, last)
    assert made.over
    with pytest.raises(AssertionError, match=f"ANSWERED does not follow {last}"):
        enter(made, Phase.ANSWERED)


def test_a_request_has_one_phase_from_its_first_message_to_its_end() -> None:
    bench = Bench()
    stream = through(bench, BUFFERED)
    phases = [bench.stream().phase, stream.phase]
    stream.receive(response_headers(OK, end_of_stream=True), now=1.0)
    phases.append(stream.phase)
    assert stream.pick is not None
    assert stream.pick.phase is stream.phase
    stream.close(now=2.0)
    assert [*phases, stream.phase] == [Phase.START, Phase.SENT, Phase.DONE, Phase.ENDED]
    assert stream.pick.phase is Phase.ENDED


def test_a_request_whose_answer_began_before_its_pick_is_never_picked() -> None:
    bench = Bench()
    stream = bench.stream()
    run(stream, head(BUFFERED), response_headers(OK))
    assert stream.phase is Phase.ANSWERED
    run(stream, request_body(BODY, end_of_stream=True))
    assert (stream.phase, stream.pick, bench.in_flight()) == (Phase.ANSWERED, None, 0)
