"""The LoRA adapters that a server holds, as far as the picker knows: those that requests asked for there, and
those that the server's last page names. Pure; an `EndpointState` holds both.
"""

from __future__ import annotations

from epp.config.policy import PolicySpec
from epp.endpoints.endpoint_state import EndpointState


def slots(state: EndpointState, *, spec: PolicySpec) -> int:
    """Return the number of adapters that the server can hold at once."""
    stated = state.metrics.max_lora if state.metrics else None
    return stated or spec.lora.slots_per_endpoint


def has_adapter(state: EndpointState, adapter: str) -> bool:
    page = state.metrics
    return adapter in state.adapters or (page is not None and adapter in page.known_adapters)


def loaded_adapters(state: EndpointState) -> set[str]:
    return set(state.adapters) | (state.metrics.known_adapters if state.metrics else frozenset())


def use_adapter(state: EndpointState, adapter: str, *, spec: PolicySpec, now: float) -> bool:
    """Remember that the server holds `adapter` now. If it has no free slot, it drops the adapter that was
    unused for longest. Returns whether the adapter has to be loaded, as far as we know.
    """
    state.changed.add(state.slot)
    loads = not has_adapter(state, adapter)
    state.adapters[adapter] = now
    state.adapters.move_to_end(adapter)
    while len(state.adapters) > slots(state, spec=spec):
        state.adapters.popitem(last=False)
    return loads
