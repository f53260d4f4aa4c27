"""The tables of phases: each phase can be reached and leads to an end, and a step that is not in the
tables fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from enum import Enum

import pytest

from epp.extproc.events import ResponseHeaders
from epp.extproc.phases import FOLLOWS, RESPONSE_FOLLOWS, Phase, ResponsePhase
from tests.unit.extproc.stream_bench import BUFFERED, OK, Bench, through


@pytest.mark.parametrize(
    ("table", "first", "last"),
    [
        pytest.param(FOLLOWS, Phase.START, Phase.CLOSED, id="request"),
        pytest.param(RESPONSE_FOLLOWS, ResponsePhase.AWAITED, ResponsePhase.DONE, id="response"),
    ],
)
def test_every_phase_comes_after_the_first_and_leads_to_the_last(
    table: Mapping[Enum, AbstractSet[Enum]], first: Enum, last: Enum
) -> None:
    assert table.keys() == set(type(first))
    assert set().union(*table.values()) == set(type(first)) - {first}
    assert [phase for phase, after in table.items() if not after] == [last]
    assert all(last in after for phase, after in table.items() if phase is not last)


def test_a_stream_goes_through_its_phases() -> None:
    bench = Bench()
    stream = through(bench, BUFFERED)
    phases = [bench.stream().phase, stream.phase]
    stream.receive(ResponseHeaders(OK, end_of_stream=True), now=1.0)
    phases.append(stream.phase)
    stream.close(now=2.0)
    assert [*phases, stream.phase] == [Phase.START, Phase.PICKED, Phase.PICKED, Phase.CLOSED]
