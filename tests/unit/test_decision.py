"""The phases of a routed request, and which phase may follow which."""

from __future__ import annotations

import pytest

from epp.picker_events import FOLLOWS, OVER, Phase
from tests.unit.telemetry.records import pick


def test_every_phase_has_a_row_and_every_phase_but_the_first_follows_another() -> None:
    assert set(FOLLOWS) == set(Phase)
    assert set().union(*FOLLOWS.values()) == set(Phase) - {Phase.SENT}


@pytest.mark.parametrize("last", sorted(OVER))
def test_nothing_follows_the_end(last: Phase) -> None:
    made = pick()
    made.enter(last)
    assert made.over
    with pytest.raises(AssertionError, match=f"answered does not follow {last}"):
        made.enter(Phase.ANSWERED)
