"""The LoRA adapters that a server holds, as far as the picker knows: those that it served, those that open
requests ask for there, and those that its last page names. Pure; an `EndpointState` holds them.
"""

from __future__ import annotations

from epp.config.policy import PolicySpec
from epp.picker.endpoints.endpoint_state import EndpointState


def slots(state: EndpointState, *, spec: PolicySpec) -> int:
    """Return the number of adapters that the server can hold at once."""
    stated = state.metrics.max_lora if state.metrics else None
    return stated or spec.lora.slots_per_endpoint


def has_adapter(state: EndpointState, adapter: str) -> bool:
    page = state.metrics
    return adapter in state.adapters or (page is not None and adapter in page.known_adapters)


def loaded_adapters(state: EndpointState) -> set[str]:
    known = state.metrics.known_adapters if state.metrics else frozenset()
    return {*state.adapters, *state.expected_adapters, *known}


def expect_adapter(state: EndpointState, adapter: str) -> bool:
    """Remember that a request for `adapter` was sent to the server. Returns whether the adapter has to be
    loaded, as far as we know.
    """
    state.changed.add(state.slot)
    loads = adapter not in state.expected_adapters and not has_adapter(state, adapter)
    state.expected_adapters[adapter] = state.expected_adapters.get(adapter, 0) + 1
    return loads


def settle_adapter(state: EndpointState, adapter: str) -> None:
    """Take in that the answer to such a request began, or that it will not begin."""
    state.changed.add(state.slot)
    state.expected_adapters[adapter] -= 1
    if not state.expected_adapters[adapter]:
        del state.expected_adapters[adapter]


def use_adapter(state: EndpointState, adapter: str, *, spec: PolicySpec, now: float) -> bool:
    """Remember that the server holds `adapter` now. If it has no free slot, it drops the adapter that was
    unused for longest. Returns whether the adapter was loaded for this, as far as we know.
    """
    state.changed.add(state.slot)
    loads = not has_adapter(state, adapter)
    state.adapters[adapter] = now
    state.adapters.move_to_end(adapter)
    while len(state.adapters) > slots(state, spec=spec):
        state.adapters.popitem(last=False)
    return loads
