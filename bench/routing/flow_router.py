"""Runs a picker with flow control as the router of a simulated fleet: requests wait in the picker, as they
would at the gateway.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.routing.picker_router import PickerRouter
from epp.base.errors import PickError
from epp.config.policy import Policy
from epp.picker.events import Pick
from epp.picker.gate import FlowClaim, Gate
from model_server.sim.fleet import WAITS
from model_server.sim.request import SimRequest


class FlowRouter(PickerRouter):
    def __init__(self, policy: Policy, *, seed: int, adapters: frozenset[str] = frozenset()) -> None:
        """Make the picker. The policy's flow.objectives name each priority by its number."""
        super().__init__(policy, seed=seed, adapters=adapters)
        self._decided: list[tuple[int, str | None]] = []
        self._gate = Gate(self.pickers[0])

    def route(self, request: SimRequest, *, now: float) -> str | None:
        gate, picker, asked = self._gate, self.pickers[0], self._pick_request(request)
        if not gate.on:
            return self._send(request, asked, picker, now=now)

        def decided(fate: Pick | PickError, at: float) -> None:
            sent = None if isinstance(fate, PickError) else self._begun(request, fate, picker, now=at)
            self._decided.append((request.request_id, sent))

        claim = FlowClaim(objective=str(request.priority), tenant=request.tenant)
        try:
            fate = gate.offer(
                asked, claim, decided, size_bytes=asked.body_bytes, longest_s=float("inf"), now=now
            )
        except PickError:
            return None
        return self._begun(request, fate, picker, now=now) if isinstance(fate, Pick) else WAITS

    def decided(self, *, now: float) -> Iterator[tuple[int, str | None]]:
        self._gate.pump(now=now)
        decided, self._decided = self._decided, []
        yield from decided

    @property
    def due_s(self) -> float:
        return self._gate.due_at
