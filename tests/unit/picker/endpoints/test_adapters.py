"""The adapters that a server holds, as far as the picker knows."""

from __future__ import annotations

from epp.base.types import EndpointMetrics
from epp.config.policy import PolicySpec
from epp.config.routing import Lora
from epp.picker.endpoints import pages
from epp.picker.endpoints.adapters import (
    expect_adapter,
    has_adapter,
    loaded_adapters,
    settle_adapter,
    slots,
    use_adapter,
)
from tests.unit.picker.endpoints.bookings import a_state

SPEC = PolicySpec(lora=Lora(slots_per_endpoint=2))


def test_as_many_adapters_as_server_has_slots_are_remembered_by_last_use() -> None:
    state = a_state()
    for now, adapter in enumerate(["x", "y", "x", "z"]):
        use_adapter(state, adapter, spec=SPEC, now=float(now))
    assert loaded_adapters(state) == {"x", "z"}
    assert not has_adapter(state, "y")


def test_slots_and_active_adapters_on_the_servers_page_are_believed() -> None:
    state = a_state()
    metrics = EndpointMetrics(scraped_at=1.0, max_lora=3, active_adapters=frozenset({"w"}))
    pages.take_in(state, metrics, now=1.0)
    for now, adapter in enumerate(["x", "y", "z"]):
        use_adapter(state, adapter, spec=SPEC, now=float(now))
    assert slots(state, spec=SPEC) == 3
    assert loaded_adapters(state) == {"w", "x", "y", "z"}
    assert has_adapter(state, "w")


def test_a_request_loads_its_adapter_if_the_server_does_not_hold_it() -> None:
    state = a_state()
    use_adapter(state, "x", spec=SPEC, now=0.0)
    assert [expect_adapter(state, name) for name in ("x", "y", "y", "z")] == [False, True, False, True]


def test_an_adapter_that_is_only_asked_for_takes_no_slot_from_another() -> None:
    state = a_state()
    for name in ("x", "y"):
        use_adapter(state, name, spec=SPEC, now=0.0)
    for _ in range(2):
        expect_adapter(state, "z")
    settle_adapter(state, "z")
    assert loaded_adapters(state) == {"x", "y", "z"}
    settle_adapter(state, "z")
    assert loaded_adapters(state) == {"x", "y"}
