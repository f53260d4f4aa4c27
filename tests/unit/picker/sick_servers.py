"""An open loop of requests before a few servers, one of them sick for a while, in simulated time.

The tests count what an operator would ask: how many requests the sick server gets, and how soon the server is
back in use after it has recovered.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, get_args

from epp.base.types import Address, ApiKind, Endpoint, EndpointMetrics, EndpointName, InferenceRequest
from epp.config.policy import DEFAULT_POLICY, FailureSettings, PolicySpec, RuleName
from epp.picker.decision import Outcome, Question
from epp.picker.endpoints.marks import Probe, Verdict
from epp.picker.events import Pick
from epp.picker.picker import Picker
from epp.request.response import NO_CONTENT, ResponseFeedback
from epp.sources.scraping.probes import verdict_of
from epp.sources.sharing.exchange import Exchange
from tests.invariants.picker import check_picker
from tests.unit.picker.picker_questions import policy_of

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

    seed: int = 1
    servers: str = "abcd"
    sick_one: str = SICK
    rule: RuleName = "least-cost"
    per_s: float = 40.0
    sick_from: float = 0.0
    sick_to: float = 20.0
    sick: Callable[[str], Answer] = lambda model: (0.002, 500)
    models: tuple[str, ...] = ("m",)
    pickers: int = 1
    clients: int = 0
    """Clients that send their next request when their last answer has ended. 0: requests come at even
    times."""
    poisoners: int = 0
    """Clients whose requests every server refuses. They send as `clients` do, besides the others."""
    poison: int = 400
    """The status, or 204: a body without a token."""
    poisoner_s: float = 0.002
    """How long each of these requests takes."""
    begins_s: float = 0.2
    """About the time until a good answer begins."""
    lasts_s: float = 2.0
    """The time from the beginning of a good answer to its end."""
    body_status: int = 0
    """The sick server's answers begin with 200, and their body shows this status."""
    tells_s: float = 0.001
    """The time from the beginning of such an answer to its end."""
    sick_part: float = 1.0
    """The part of the sick server's answers that is bad."""
    bare_part: float = 0.0
    """The part of the good answers that has no token, and rightly so, at every server."""
    streams: bool = True
    """The answers are streamed. Others come whole, when they are complete."""
    readable: bool = True
    """The data plane hands the picker the bodies of answers that it asks for."""
    wants_key: bool = False
    """All servers answer probes as they do poisoners, because the pickers have no key."""
    shares: bool = False
    """The pickers share what they know, 20 ms later."""
    stuck: bool = False
    """The sick server's answers begin, and then neither a token nor an end follows."""
    frozen: bool = False
    """The sick server's page shows no number that grows, also while it works."""
    cuts: bool = False
    """The sick server's answers begin well and break off. Envoy's access log reports that a little later."""
    cuts_probes: bool = True
    failures: FailureSettings = DEFAULT_POLICY.spec.failures
    sent: list[tuple[float, str]] = field(default_factory=list)
    """When each request was sent, and to which server."""
    good: list[bool] = field(default_factory=list)
    """For each of these, whether it is not a poisoner's."""
    failed: int = 0
    ejected_s: float = 0.0
    """How long the pickers left a server out, all together."""
    out: list[str] = field(default_factory=list)
    """The servers that a picker ejects at the end."""

    def run(self, until_s: float) -> Traffic:
        run = _Run(self)
        run.until(until_s)
        self.good = run.good
        self.sent, self.failed, self.ejected_s = run.sent, run.failed, run.ejected_s
        self.out = run.ejected(until_s)
        return self

    def to(self, name: str, *, since: float, until: float) -> float:
        """Return the share of the good requests of this time that were sent to the server."""
        sent = zip(self.sent, self.good, strict=True)
        chosen = [n for (at, n), good in sent if good and since <= at < until]
        return chosen.count(name) / len(chosen)

    def of_first_ten(self) -> int:
        """Return how many of the first ten requests since it is sick the sick server got."""
        return [name for at, name in self.sent if at >= self.sick_from][:10].count(self.sick_one)

    def first_ten_apart(self) -> float:
        """Return the sick server's share of the first hundred requests, without the first ten that it got."""
        counts = Counter(name for _, name in self.sent[:100])
        return max(0, counts[SICK] - 10) / 100


class _Run:
    """One run of the traffic: the pickers, the servers, and what will happen when."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.sent: list[tuple[float, str]] = []
        self.good: list[bool] = []
        self.failed = 0
        self.ejected_s = 0.0
        self._rng = random.Random(traffic.seed)
        self._fleet = [
            Endpoint(EndpointName(n), Address(f"10.0.0.{i}", 1)) for i, n in enumerate(traffic.servers, 1)
        ]
        self._address = {endpoint.name: endpoint.address for endpoint in self._fleet}
        self._name = {endpoint.address: endpoint.name for endpoint in self._fleet}
        spec = PolicySpec(rule=traffic.rule, failures=traffic.failures)
        self._pickers = [
            Picker(policy_of(spec), rng=random.Random(100 * traffic.seed + n)) for n in range(traffic.pickers)
        ]
        for picker in self._pickers:
            picker.news.set_endpoints(self._fleet, now=0.0)
        self._exchanges = [
            Exchange(picker, me=b"%d" % n, outbox_bytes=2**20) for n, picker in enumerate(self._pickers)
        ]
        self._tokens = dict.fromkeys(self._address, 0.0)
        self._running: Counter[EndpointName] = Counter()
        self._began: Counter[EndpointName] = Counter()
        self._finished: Counter[EndpointName] = Counter()
        self._events: list[tuple[float, int, Step]] = []
        self._count = 0

    def until(self, until_s: float) -> None:
        self._at(0.0, self._scrape)
        self._at(0.1, self._probe)
        if self.traffic.shares:
            self._at(0.02, self._share)
        if not self.traffic.clients:
            self._at(0.01, self._arrive)
        for n in range(self.traffic.clients + self.traffic.poisoners):
            self._at(0.01 + 0.001 * n, partial(self._send, client=n))
        while self._events and self._events[0][0] <= until_s:
            when, _, step = heapq.heappop(self._events)
            step(when)
        for picker in self._pickers:
            check_picker(picker)

    def ejected(self, now: float) -> list[str]:
        return [state.endpoint.name for picker in self._pickers for state in picker.news.ejected(now=now)]

    def _at(self, when: float, step: Step) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, step))

    def _is_ill(self, name: str, now: float) -> bool:
        return name == self.traffic.sick_one and self.traffic.sick_from <= now < self.traffic.sick_to

    def _is_bad(self) -> bool:
        return self.traffic.sick_part >= 1 or self._rng.random() < self.traffic.sick_part

    def _scrape(self, now: float) -> None:
        for name in self._address:
            if self._running[name] and not (self.traffic.stuck and self._is_ill(name, now)):
                self._tokens[name] += self._running[name]
        for picker in self._pickers:
            for name, tokens in self._tokens.items():  # The sick server's metrics are fine: it looks idle.
                page = EndpointMetrics(
                    scraped_at=now,
                    generated_tokens=tokens,
                    finished=float(self._finished[name]),
                    ttft_count=float(self._began[name]),
                )
                if self.traffic.frozen and name == self.traffic.sick_one:
                    page = EndpointMetrics(scraped_at=now, generated_tokens=0.0, finished=0.0, ttft_count=0.0)
                picker.news.observe(name, page, now=now)
        self._at(now + 1.0, self._scrape)

    def _probe(self, now: float) -> None:
        for picker in self._pickers:
            self.ejected_s += 0.1 * len(picker.news.ejected(now=now))
            for due in picker.fleet.failures.probes_due(now=now):
                delay, verdict = self._answer_to_probe(due, now)
                self._at(now + delay, _report(picker, due, verdict))
        self._at(now + 0.1, self._probe)

    def _answer_to_probe(self, due: Probe, now: float) -> tuple[float, Verdict]:
        ill = self._is_ill(due.state.endpoint.name, now)
        ill = ill and self._is_bad()
        delay, status = self.traffic.sick(due.model) if ill else (0.1, 200)
        if ill and self.traffic.cuts:
            return delay, "ill" if self.traffic.cuts_probes else "well"
        if status is None or (ill and self.traffic.stuck):
            return 3.0, "unclear" if due.queued else "ill"
        if self.traffic.wants_key:
            return delay, verdict_of(self.traffic.poison, about_model=False)
        in_body = self.traffic.body_status if ill and status < 400 else 0
        return delay, verdict_of(in_body if in_body >= 400 else status, about_model=bool(due.mark.about))

    def _share(self, now: float) -> None:
        for one in self._exchanges:
            if (batch := one.next_batch(now=now)) is not None:
                for other in self._exchanges:
                    list(other.listener.apply(batch, now=now))
        self._at(now + 0.02, self._share)

    def _arrive(self, now: float) -> None:
        self._at(now + 1 / self.traffic.per_s, self._arrive)
        self._send(now)

    def _send(self, now: float, client: int | None = None) -> None:
        """Send one request. A client sends its next one when this one has ended, with the same beginning."""
        picker = self._rng.choice(self._pickers)
        model = self._rng.choice(self.traffic.models)
        beginning = b"" if client is None else b"client %d" % (100 * self.traffic.seed + client) * 200
        prompt = beginning + self._rng.randbytes(200).hex().encode()
        number = self._rng.randrange(1000) if client is None else client
        session = f"s{self.traffic.seed}-{number}" if self.traffic.rule == "session" else ""
        inference = InferenceRequest(
            kind=ApiKind.CHAT, model=model, prompt=prompt, stream=self.traffic.streams
        )
        pick = picker.pick(Question("r", inference, session=session, path_hash=1), now=now)
        picker.housekeep(now=now)
        self.sent.append((now, pick.decision.chosen))
        self.good.append(client is None or client < self.traffic.clients)
        self._serve(_Request(self, picker, pick, model, pick.destinations[0], client), now)

    def over(self, request: _Request, now: float) -> None:
        """The client has the end of its answer."""
        client = request.client
        if client is not None:
            self._at(now + 0.0005, lambda then: self._send(then, client))

    def _serve(self, request: _Request, now: float) -> None:
        """A server gets the request, and its answer is under way."""
        ill = self._is_ill(self._name[request.served], now) and self._is_bad()
        begins_s = self._rng.uniform(0.5, 1.5) * self.traffic.begins_s
        if not self.traffic.streams:
            begins_s += self.traffic.lasts_s
        delay, status = self.traffic.sick(request.model) if ill else (begins_s, 200)
        if request.client is not None and request.client >= self.traffic.clients:
            ill, delay, status = False, self.traffic.poisoner_s, self.traffic.poison
        if status is None:
            self._at(now + 10.0, request.end("aborted"))
            self.failed += 1
        else:
            self.failed += status >= 300
            follow = self._finish
            if ill and self.traffic.stuck:
                follow = self._fall_silent
            elif ill and self.traffic.cuts:
                follow = self._cut
            elif (ill and self.traffic.body_status and status == 200) or status == NO_CONTENT:
                follow = self._tell
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

    def _tell(self, request: _Request, status: int, now: float) -> None:
        self.failed += 1
        body_status = self.traffic.body_status or status
        self._at(now + self.traffic.tells_s, request.end("ended", body_status=body_status))

    def _finish(self, request: _Request, status: int, now: float) -> None:
        name = self._name[request.served]
        self._running[name] += 1
        if status == 200:
            self._tokens[name] += 1
            self._began[name] += 1
        bare = self.traffic.bare_part > 0 and self._rng.random() < self.traffic.bare_part
        shows = None if status >= 300 else NO_CONTENT if bare else 200
        end = request.end("failed" if status >= 500 else "ended", body_status=shows)

        def over(then: float) -> None:
            self._running[name] -= 1
            self._finished[name] += 1
            end(then)

        goes_on = status == 200 and self.traffic.streams
        self._at(now + (self.traffic.lasts_s if goes_on else 0.0), over)


@dataclass(frozen=True, slots=True)
class _Request:
    """A request on its way to the server at `served`."""

    run: _Run
    picker: Picker
    pick: Pick
    model: str
    served: Address
    client: int | None

    def end(self, outcome: Outcome, *, body_status: int | None = None) -> Step:
        """body_status: the status that the answer's body tells, if the picker reads the body."""

        def ended(now: float) -> None:
            if body_status is not None and self.run.traffic.readable and self.pick.sampled:
                self.picker.on_feedback(self.pick, ResponseFeedback(status=body_status), now=now)
            self.picker.end(self.pick, outcome=outcome, now=now)
            self.run.over(self, now)

        return ended

    def log_cut(self, now: float) -> None:
        """Envoy's access log reports the cut."""
        assert self.picker.news.answer_cut(self.served, now=now)


_Follow = Callable[[_Request, int, float], None]
"""What follows after the headers of an answer with this status."""


def _report(picker: Picker, due: Probe, verdict: Verdict) -> Step:
    return lambda now: picker.fleet.failures.probed(due, verdict, now=now)


def hang(model: str) -> Answer:
    return 0.0, None


def refuses(model: str) -> Answer:
    return 0.002, 401


def lacks_x(model: str) -> Answer:
    return (0.002, 404) if model == "x" else (0.2, 200)


def begins(model: str) -> Answer:
    return 0.002, 200
