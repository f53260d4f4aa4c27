"""How long calls have waited before the picker read them, by the times that the data plane sends."""

from epp.extproc.call_ages import CallAges


def test_a_clock_that_is_behind_or_a_slow_filter_makes_no_call_late() -> None:
    ages = CallAges()
    assert [ages.waited_s("a", 5.0 + step / 8, now=float(step)) for step in range(3)] == [0.0, 0.125, 0.25]
    assert ages.waited_s("b", -3.0, now=3.0) == 0.0
    assert ages.waited_s("b", -2.5, now=3.0) == 0.5


def test_a_clock_that_was_set_is_believed_within_260_seconds() -> None:
    ages = CallAges()
    ages.waited_s("a", 1.0, now=0.0)
    assert ages.waited_s("a", 3.0, now=130.0) == 2.0
    assert ages.waited_s("a", 3.0, now=260.0) == 0.0


def test_values_that_are_not_times_are_ignored() -> None:
    ages = CallAges()
    for odd in (float("nan"), float("inf"), -1000.0, 1000.0):
        assert ages.waited_s("a", odd, now=0.0) == 0.0
    ages.waited_s("a", 1.0, now=0.0)
    assert ages.waited_s("a", 1.5, now=0.0) == 0.5


def test_the_number_of_remembered_peers_is_bounded() -> None:
    ages = CallAges()
    for peer in range(5000):
        ages.waited_s(str(peer), 1.0, now=0.0)
    assert ages.waited_s("0", 2.0, now=0.0) == 0.0, "the peer counts as new"
    assert ages.waited_s("4999", 2.0, now=0.0) == 1.0
