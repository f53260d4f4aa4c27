"""The invariants of the picker (`epp/picker`): its own, and those of all parts that it owns."""

from epp.picker.dry_run import DryRun
from epp.picker.fleet_news import FleetNews
from epp.picker.guesses import Guesses
from epp.picker.picker import Picker
from epp.picker.remembered import _MOST, _MOST_STATES, FatalRequests, KeptState
from epp.picker.scheduling.least_cost import _MOST_REQUESTS, Demand
from tests.invariants.fleet import check_fleet
from tests.invariants.table import check_table


def check_picker(picker: Picker) -> None:
    check_news(picker.news)
    check_kept_state(picker.kept_state)
    check_fatal(picker.fatal)


def check_news(news: FleetNews) -> None:
    check_fleet(news.fleet)
    check_table(news.caches.table)
    _check_guesses(news.guesses)
    present = {state.endpoint.name for state in news.fleet.states()}
    assert not present & news._left.keys()
    assert set(news.caches.table.mirrors) == present | news._left.keys(), "present, or it may come back"


def _check_guesses(guesses: Guesses) -> None:
    for booking, work in guesses._awaited.items():
        assert work.guess.booking is booking
    assert not any(state.gone for state in guesses._doubted)


def check_settled(picker: Picker) -> None:
    """Check that nothing is left of requests that are over, after pages that can show what became of them."""
    assert not picker.guesses._awaited
    assert not picker.guesses._doubted
    assert picker.caches.table.guessed_entries == 0
    for state in picker.fleet.states():
        assert state.in_flight == 0
        assert not state.backlog.bookings
        assert not state.account.waits
        assert not state.expected_adapters


def check_kept_state(kept: KeptState) -> None:
    assert len(kept._holders) <= _MOST_STATES


def check_fatal(fatal: FatalRequests) -> None:
    assert len(fatal.struck) <= _MOST
    assert 0 not in fatal.struck
    assert all(strikes > 0 for strikes, _ in fatal.struck.values())


def check_dry_run(tried: DryRun) -> None:
    assert 0 <= tried.agreed <= tried.picks - tried.refused
    # Each request is rounded separately.
    assert -tried.picks <= tried.cached_tokens + tried.more_cached_tokens <= tried.prompt_tokens + tried.picks


def check_demand(demand: Demand) -> None:
    assert demand._times == sorted(demand._times)
    for last in demand._by_prefix.values():
        assert last.open >= 0
        assert 0 < len(last.times) <= _MOST_REQUESTS + last.open
        assert last.times == sorted(last.times)
