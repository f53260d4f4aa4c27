"""The invariants of the account of missed tokens (`epp/observe/misses`)."""

from epp.observe.misses import _MOST_SEEN, _MOST_WAITING_STEPS, Misses, Seen, _steps


def check_misses(misses: Misses) -> None:
    check_seen(misses.seen)
    waiting = sum(_steps(request) for _, request in misses._waiting)
    assert waiting == misses._waiting_steps <= _MOST_WAITING_STEPS


def check_seen(seen: Seen) -> None:
    assert len(seen._sent) <= _MOST_SEEN
    assert len(seen.sampled([*seen._sent])) == len(seen._sent)
