"""Requests that flow control holds: three busy servers, a gate in front of them, and streams that wait."""

from collections.abc import Sequence

from epp.config.flow import Flow
from epp.config.policy import Cost
from epp.picker.events import Phase
from epp.picker.gate import Gate
from epp.protocol.http_events import Action, Modes
from epp.protocol.settings import StreamSettings
from epp.protocol.stream import HttpStream
from tests.invariants.flow import check_gate
from tests.invariants.protocol import check_stream
from tests.unit.protocol.stream_bench import BODY, BUFFERED, Bench, a_stream, head, request_body

END = request_body(BODY, end_of_stream=True)


class Held:
    """Three servers that are busy for long, and a gate in front of them."""

    def __init__(self, *, longest_delay_s: float = 10.0, given_delay_s: float = 0.0, **flow: object) -> None:
        spec = Flow(mode="Hold", **flow)  # type: ignore[arg-type]  # any field of it
        settings = StreamSettings(longest_delay_s=longest_delay_s, given_delay_s=given_delay_s)
        self.bench = Bench(settings=settings, flow=spec, cost=Cost(prefill_tokens_per_second=1.0))
        self.gate = Gate(self.bench.picker)
        self.later: list[Action] = []
        for state in self.bench.picker.fleet.states():
            self.fill(state.endpoint.name)

    def fill(self, name: str) -> None:
        stream = self.bench.stream()
        stream.receive(head(BUFFERED), now=0.0)
        stream.receive(END, now=0.0)

    def stream(self) -> HttpStream:
        bench = self.bench
        return a_stream(bench.picker, bench.settings, gate=self.gate, deliver=self.later.extend)

    def waits(self, modes: Modes, *extra: tuple[str, str]) -> tuple[HttpStream, Sequence[Action]]:
        """Return a stream whose request is held, and the answer to its body."""
        stream = self.stream()
        stream.receive(head(modes, *extra), now=1.0)
        answered = stream.receive(END, now=1.0)
        check_stream(stream)
        assert stream.phase is Phase.WAITING
        assert self.gate.waiting == 1
        return stream, answered

    def tenants(self) -> Sequence[tuple[int, str, int]]:
        """Return priority, tenant and number of the waiting requests."""
        return [
            (t.priority, t.tenant, t.requests) for flow in self.gate.status(now=1.0) for t in flow.tenants
        ]

    def free(self) -> None:
        """Let the gate look long afterwards, when all servers are idle."""
        self.gate.pump(now=10_000.0)
        check_gate(self.gate)
