"""The adapters that a server holds, as far as the picker knows."""

from __future__ import annotations

from epp.config.policy import PolicySpec
from epp.config.routing import Lora
from epp.endpoints import pages
from epp.endpoints.adapters import has_adapter, loaded_adapters, slots, use_adapter
from epp.types import EndpointMetrics
from tests.unit.endpoints.bookings import a_state

SPEC = PolicySpec(lora=Lora(slots_per_endpoint=2))


def test_adapters_are_remembered_by_last_use_within_the_servers_slots() -> None:
    state = a_state()
    for now, adapter in enumerate(["x", "y", "x", "z"]):
        use_adapter(state, adapter, spec=SPEC, now=float(now))
    assert loaded_adapters(state) == {"x", "z"}
    assert not has_adapter(state, "y")


def test_the_servers_own_word_on_slots_and_active_adapters_counts() -> None:
    state = a_state()
    metrics = EndpointMetrics(scraped_at=1.0, max_lora=3, active_adapters=frozenset({"w"}))
    pages.take_in(state, metrics, now=1.0)
    for now, adapter in enumerate(["x", "y", "z"]):
        use_adapter(state, adapter, spec=SPEC, now=float(now))
    assert slots(state, spec=SPEC) == 3
    assert loaded_adapters(state) == {"w", "x", "y", "z"}
    assert has_adapter(state, "w")


def test_an_adapter_is_loaded_for_the_first_request_of_those_that_keep_it() -> None:
    state = a_state()
    used = [use_adapter(state, name, spec=SPEC, now=0.0) for name in ("x", "x", "y", "z", "x")]
    assert used == [True, False, True, True, True]
