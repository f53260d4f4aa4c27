"""Runs pickers with flow control as the router of a simulated fleet: requests wait in the pickers, as they
would at the gateway. Each request comes to a random picker, as from a data plane with several pickers. Each
picker has its own queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.routing.picker_router import PickerRouter
from epp.base.errors import PickError
from epp.config.policy import Policy
from epp.picker.events import Pick
from epp.picker.gate import FlowClaim, Gate
from model_server.sim.fleet import WAITS
from model_server.sim.request import SimRequest


class FlowRouter(PickerRouter):
    def __init__(
        self,
        policy: Policy,
        *,
        seed: int,
        replicas: int = 1,
        share_delay_s: float | None = None,
        adapters: frozenset[str] = frozenset(),
    ) -> None:
        """Make the pickers. The policy's flow.objectives name each priority by its number."""
        self._gates: list[Gate] = []
        self._decided: list[tuple[int, str | None]] = []
        super().__init__(policy, seed=seed, replicas=replicas, share_delay_s=share_delay_s, adapters=adapters)
        if not self._gates:
            self._gates_of_pickers()

    def _gates_of_pickers(self) -> Sequence[Gate]:
        self._gates = [Gate(picker) for picker in self.pickers]
        return self._gates

    @property
    def gates(self) -> Sequence[Gate]:
        """Return the gates. Callers only read them."""
        return self._gates

    def route(self, request: SimRequest, *, now: float) -> str | None:
        self.advance(now)
        number = self._rng.randrange(len(self._gates))
        gate, picker, asked = self._gates[number], self.pickers[number], self._pick_request(request)
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
        self.advance(now)
        for gate in self._gates:
            gate.pump(now=now)
        decided, self._decided = self._decided, []
        yield from decided

    @property
    def due_s(self) -> float:
        return min(gate.due_at for gate in self._gates)
