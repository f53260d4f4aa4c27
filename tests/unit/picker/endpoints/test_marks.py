"""What a mark remembers about a server that has failed."""

from __future__ import annotations

import pytest

from epp.picker.endpoints.marks import LONGEST_TRIALS, STEP, Form, Mark, Proof
from tests.unit.picker.endpoints.bookings import a_state


def test_a_share_halves_every_five_seconds_but_not_while_the_server_is_left_out() -> None:
    mark = Mark(a_state(), share=0.8, at=10.0)
    assert [mark.now(at) for at in (10.0, 15.0, 20.0)] == pytest.approx([0.8, 0.4, 0.2])
    assert mark.now(9.0) == 0.8, "time that runs backwards raises no share"
    mark.leave_out(picks=5, now=10.0)
    assert mark.now(100.0) == 0.8


def test_a_server_that_is_left_out_waits_for_its_first_trial_and_its_last_probe_is_forgotten() -> None:
    mark = Mark(a_state(), share=0.8, at=10.0, verdict="well")
    mark.leave_out(picks=5, now=10.0)
    assert (mark.out, mark.verdict) == (True, None)
    assert (mark.tried_at, mark.tried_picks) == (10.0, 5)


def test_a_trial_that_is_allowed_is_due_at_once() -> None:
    mark = Mark(a_state())
    mark.leave_out(picks=5, now=10.0)
    mark.allow_trial(2.0, now=11.0)
    assert 11.0 - mark.tried_at == LONGEST_TRIALS * 2.0


@pytest.mark.parametrize(("share", "after"), [(1.0, STEP), (0.1, 0.1)])
def test_a_server_that_has_recovered_has_at_most_the_share_of_one_failure(share: float, after: float) -> None:
    mark = Mark(a_state(), share=share, at=1.0, out=True, suspected=Form.STALLS, needs=Proof.COUNTED)
    mark.recover(now=20.0)
    assert (mark.out, mark.suspected, mark.needs) == (False, None, Proof.BEGUN)
    assert (mark.now(20.0), mark.now(25.0)) == (after, after / 2)
