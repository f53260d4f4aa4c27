"""An open loop of requests before a few servers, one of them sick for a while, in simulated time.

The tests count what an operator would ask: how many requests the sick server gets, and how soon the server is
back in use after it has recovered.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, get_args

from epp.config.policy import DEFAULT_POLICY, PolicySpec, RuleName
from epp.config.routing import Failures
from epp.decision import Outcome, PickRequest
from epp.endpoints.marks import Probe, Verdict
from epp.picker.events import Pick
from epp.picker.picker import Picker
from epp.scraping.probes import verdict_of
from epp.types import Address, ApiKind, Endpoint, EndpointMetrics, EndpointName, InferenceRequest
from tests.unit.picker_questions import policy_of

SICK: Final = "a"
RULES: tuple[RuleName, ...] = get_args(RuleName)

Step = Callable[[float], None]
"""Called with the time at which it happens."""

Answer = tuple[float, int | None]
"""The seconds until an answer begins, and its status. None: there is no answer, and the client leaves after
ten seconds."""


@dataclass
class Traffic:
    """Requests come at even times. Healthy servers take some seconds, and the sick server does what `sick`
    says for the model of the request.
    """

    servers: str = "abcd"
    rule: RuleName = "least-cost"
    per_s: float = 40.0
    sick_from: float = 0.0
    sick_to: float = 20.0
    sick: Callable[[str], Answer] = lambda model: (0.002, 500)
    models: tuple[str, ...] = ("m",)
    retries: bool = False
    """The data plane sends a request that failed to the second destination of its pick."""
    pickers: int = 1
    stuck: bool = False
    """The sick server's answers begin, and then neither a token nor an end follows."""
    cuts: bool = False
    """The sick server's answers begin well and break off. Envoy's access log reports that a little later."""
    cuts_probes: bool = True
    probes: bool = True
    """The pickers send their probes. A server answers a probe as it would answer a request."""
    failures: Failures = DEFAULT_POLICY.spec.failures
    sent: list[tuple[float, str]] = field(default_factory=list)
    """When each request was sent, and to which server."""
    failed: int = 0

    def run(self, until_s: float) -> Traffic:
        run = _Run(self)
        run.until(until_s)
        self.sent, self.failed = run.sent, run.failed
        return self

    def to(self, name: str, *, since: float, until: float) -> float:
        """Return the share of the requests of this time that were sent to the server."""
        chosen = [n for at, n in self.sent if since <= at < until]
        return chosen.count(name) / len(chosen)

    def first_ten_apart(self) -> float:
        """Return the sick server's share of the first hundred requests, without the first ten that it got."""
        counts = Counter(name for _, name in self.sent[:100])
        return max(0, counts[SICK] - 10) / 100


class _Run:
    """One run of the traffic: the pickers, the servers, and what will happen when."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.sent: list[tuple[float, str]] = []
        self.failed = 0
        self._rng = random.Random(1)
        self._fleet = [
            Endpoint(EndpointName(n), Address(f"10.0.0.{i}", 1)) for i, n in enumerate(traffic.servers, 1)
        ]
        self._address = {endpoint.name: endpoint.address for endpoint in self._fleet}
        self._name = {endpoint.address: endpoint.name for endpoint in self._fleet}
        spec = PolicySpec(rule=traffic.rule, failures=traffic.failures)
        self._pickers = [Picker(policy_of(spec), rng=random.Random(n)) for n in range(traffic.pickers)]
        for picker in self._pickers:
            picker.set_endpoints(self._fleet, now=0.0)
        self._tokens = dict.fromkeys(self._address, 0.0)
        self._running: Counter[EndpointName] = Counter()
        self._events: list[tuple[float, int, Step]] = []
        self._count = 0

    def until(self, until_s: float) -> None:
        self._at(0.0, self._scrape)
        if self.traffic.probes:
            self._at(0.1, self._probe)
        self._at(0.01, self._arrive)
        while self._events and self._events[0][0] <= until_s:
            when, _, step = heapq.heappop(self._events)
            step(when)
        for picker in self._pickers:
            picker.check_integrity()

    def _at(self, when: float, step: Step) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, step))

    def _is_ill(self, name: str, now: float) -> bool:
        return name == SICK and self.traffic.sick_from <= now < self.traffic.sick_to

    def _scrape(self, now: float) -> None:
        for name in self._address:
            if self._running[name] and not (self.traffic.stuck and self._is_ill(name, now)):
                self._tokens[name] += self._running[name]
        for picker in self._pickers:
            for name, tokens in self._tokens.items():  # The sick server's metrics are fine: it looks idle.
                picker.observe(name, EndpointMetrics(scraped_at=now, generated_tokens=tokens), now=now)
        self._at(now + 1.0, self._scrape)

    def _probe(self, now: float) -> None:
        for picker in self._pickers:
            for due in picker.probes_due(now=now):
                delay, verdict = self._answer_to_probe(due, now)
                self._at(now + delay, _report(picker, due, verdict))
        self._at(now + 0.25, self._probe)

    def _answer_to_probe(self, due: Probe, now: float) -> tuple[float, Verdict]:
        ill = self._is_ill(due.state.endpoint.name, now)
        delay, status = self.traffic.sick(due.model) if ill else (0.1, 200)
        if ill and self.traffic.cuts:
            return delay, "ill" if self.traffic.cuts_probes else "well"
        if status is None or (ill and self.traffic.stuck):
            return 3.0, "unclear" if due.queued else "ill"
        return delay, verdict_of(status, about_model=bool(due.about))

    def _arrive(self, now: float) -> None:
        self._at(now + 1 / self.traffic.per_s, self._arrive)
        picker = self._rng.choice(self._pickers)
        model = self._rng.choice(self.traffic.models)
        prompt = self._rng.randbytes(200).hex().encode()
        session = f"s{self._rng.randrange(1000)}" if self.traffic.rule == "session" else ""
        inference = InferenceRequest(kind=ApiKind.CHAT, model=model, prompt=prompt, stream=True)
        pick = picker.pick(PickRequest("r", inference, session=session), now=now)
        picker.housekeep(now=now)
        self.sent.append((now, pick.decision.chosen))
        self._serve(_Request(picker, pick, model, pick.destinations[0]), now)

    def _serve(self, request: _Request, now: float) -> None:
        """A server gets the request, and its answer is under way."""
        ill = self._is_ill(self._name[request.served], now)
        delay, status = self.traffic.sick(request.model) if ill else (self._rng.uniform(0.1, 0.3), 200)
        if status is None:
            self._at(now + 10.0, request.end("aborted"))
            self.failed += 1
        elif status >= 500 and self.traffic.retries and request.served == request.pick.destinations[0]:
            again = replace(request, served=request.pick.destinations[1])
            self._at(now + delay, lambda then: self._serve(again, then))
        else:
            self.failed += status >= 400
            follow = self._fall_silent if ill and self.traffic.stuck else self._finish
            if ill and self.traffic.cuts and not self.traffic.stuck:
                follow = self._cut
            self._at(now + delay, lambda then: self._answer(request, status, follow, then))

    def _answer(self, request: _Request, status: int, follow: _Follow, now: float) -> None:
        request.picker.on_response_headers(request.pick, status=status, served=request.served, now=now)
        follow(request, status, now)

    def _fall_silent(self, request: _Request, status: int, now: float) -> None:
        self._at(now + 10.0, request.end("aborted"))

    def _cut(self, request: _Request, status: int, now: float) -> None:
        self._at(now + 0.05, request.end("ended"))
        self._at(now + 0.3, request.log_cut)
        self.failed += 1

    def _finish(self, request: _Request, status: int, now: float) -> None:
        name = self._name[request.served]
        self._tokens[name] += 1
        self._running[name] += 1
        end = request.end("failed" if status >= 500 else "ended")

        def over(then: float) -> None:
            self._running[name] -= status == 200
            end(then)

        self._at(now + (2.0 if status == 200 else 0.0), over)


@dataclass(frozen=True, slots=True)
class _Request:
    """A request on its way to the server at `served`."""

    picker: Picker
    pick: Pick
    model: str
    served: Address

    def end(self, outcome: Outcome) -> Step:
        return lambda now: self.picker.end(self.pick, outcome=outcome, now=now)

    def log_cut(self, now: float) -> None:
        """Envoy's access log reports the cut."""
        assert self.picker.answer_cut(self.served, now=now)


_Follow = Callable[[_Request, int, float], None]
"""What follows after the headers of an answer with this status."""


def _report(picker: Picker, due: Probe, verdict: Verdict) -> Step:
    return lambda now: picker.probed(due, verdict, now=now)


def hang(model: str) -> Answer:
    return 0.0, None


def refuse(model: str) -> Answer:
    return 0.002, 429


def lacks_x(model: str) -> Answer:
    return (0.002, 404) if model == "x" else (0.2, 200)


def begins(model: str) -> Answer:
    return 0.002, 200
