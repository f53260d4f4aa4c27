"""The invariants of the endpoints' state (`epp/picker/endpoints`)."""

from collections.abc import Mapping

import numpy as np

from epp.picker.endpoints.answers import MOST_ENDS, Answers
from epp.picker.endpoints.backlog import Backlog
from epp.picker.endpoints.failures import FailingServers
from epp.picker.endpoints.fleet import Columns, Fleet
from epp.picker.endpoints.served_models import AwayModels, ServedModels
from epp.picker.endpoints.unreported import Unreported
from epp.picker.scheduling.snapshot import MOST_KEPT


def check_fleet(fleet: Fleet) -> None:
    assert list(fleet._by_name.values()) == list(fleet._by_address.values()) == list(fleet._in_slots)
    assert fleet._columns.roster.models == [state.model for state in fleet._in_slots]
    for name, state in fleet._by_name.items():
        assert state.endpoint.name == name
        assert state.in_flight >= 0
        assert state.peers_in_flight >= 0
        assert state.failures >= 0
        check_backlog(state.backlog)
    check_columns(fleet._columns)
    _check_served(fleet.served)
    _check_answers(fleet.answers)
    check_failures(fleet.failures)
    check_unreported(fleet.unreported)


def check_columns(columns: Columns) -> None:
    columns.follow()
    holders: Mapping[str, set[int]] = {a: set() for a in columns._holders}
    for slot, state in enumerate(columns._states):
        assert state.slot == slot
        assert state.changed is columns.changed
        assert columns._rate[slot] == state.tokens_per_s
        assert (slot in columns.failed) == bool(state.failures)
        assert columns._pages[slot] is state.metrics
        assert (slot in columns.asleep) == (state.metrics is not None and state.metrics.asleep)
        assert np.isnan(columns._waiting[slot]) or columns._most[0] >= columns._waiting[slot]
        assert columns._loaded[slot] == state.loaded_adapters, "each change was noted"
        row = [column[slot] for column in columns._rows]
        columns._copy(slot)
        assert row == [column[slot] for column in columns._rows], "each change was noted"
        for adapter in columns._loaded[slot]:
            holders[adapter].add(slot)
    assert columns._holders == holders


def check_backlog(backlog: Backlog) -> None:
    assert backlog.tokens == sum(b.tokens for b in backlog.bookings)
    assert 0 <= backlog.drained_tokens <= backlog.tokens
    assert all(0 <= b.tokens <= b.ahead_tokens for b in backlog.bookings)
    assert backlog.unbegun >= 0


def _check_served(served: ServedModels) -> None:
    unlisted = [s for s, one in enumerate(served._states) if one.listed is None or not one.listed.whole]
    assert served.unlisted == unlisted
    _check_away(served.away)


def _check_away(away: AwayModels) -> None:
    assert all(len(models) <= MOST_KEPT for models in away._left.values())
    assert all([*models.values()] == sorted(models.values()) for models in away._left.values())


def _check_answers(answers: Answers) -> None:
    assert len(answers.served) <= MOST_KEPT
    assert all(0 < account.noes <= MOST_ENDS for _, _, account, _ in answers._noes)


def check_failures(failures: FailingServers) -> None:
    assert len(failures.marks) <= MOST_KEPT
    assert all(0.0 <= mark.share <= 1.0 for mark in failures.marks.values())
    assert all((mark.state, mark.about) == key for key, mark in failures.marks.items())
    assert all(list(mark.ends) == sorted(mark.ends) for mark in failures.marks.values())
    assert all(len(mark.ends) <= MOST_ENDS for mark in failures.marks.values())


def check_unreported(unreported: Unreported) -> None:
    assert all(picks >= 0 for picks, _ in unreported.of_models.values())
