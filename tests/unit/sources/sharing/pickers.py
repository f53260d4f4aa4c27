"""Several real pickers with an exchange each. The test controls the channel between them."""

import random
from collections.abc import Sequence

from epp.base.types import Address, ApiKind, Endpoint, EndpointMetrics, EndpointName, InferenceRequest
from epp.config.policy import DEFAULT_POLICY, Policy
from epp.picker.decision import Outcome, Question
from epp.picker.events import Pick
from epp.picker.picker import Picker
from epp.picker.prefix_index.secret import HashSecret
from epp.sources.sharing.exchange import PEER_TIMEOUT_S, Exchange
from tests.invariants.picker import check_picker
from tests.invariants.sharing import check_exchange

TIMEOUT_S = PEER_TIMEOUT_S
NO_SECRET = HashSecret()


def endpoints(names: str = "ab", *, incarnation: str = "") -> list[Endpoint]:
    return [
        Endpoint(EndpointName(n), Address(f"10.0.0.{i}", 8000), model="m", incarnation=incarnation)
        for i, n in enumerate(names, start=1)
    ]


class Replica:
    """One picker and its exchange."""

    def __init__(
        self,
        number: int,
        *,
        on: Sequence[Endpoint] = (),
        outbox_bytes: int = 2**24,
        policy: Policy = DEFAULT_POLICY,
        secret: HashSecret = NO_SECRET,
    ) -> None:
        self.picker = Picker(policy, rng=random.Random(number), secret=secret)
        self.picker.news.set_endpoints(on or endpoints(), now=0.0)
        self.exchange = Exchange(self.picker, me=number.to_bytes(8, "little"), outbox_bytes=outbox_bytes)

    def pick(self, prompt: bytes, *, now: float, model: str = "m", only: Address | None = None) -> Pick:
        inference = InferenceRequest(kind=ApiKind.CHAT, model=model, prompt=prompt, stream=True)
        subset = frozenset({only}) if only is not None else None
        return self.picker.pick(Question(request_id="r", inference=inference, subset=subset), now=now)

    def end(self, pick: Pick, *, now: float, outcome: Outcome = "ended", status: int = 200) -> None:
        self.picker.on_response_headers(pick, status=status, served=None, now=now)
        self.picker.end(pick, outcome=outcome, now=now)

    def sees_restart(self, name: EndpointName, *, now: float) -> None:
        """Let this picker see the endpoint's counters go back."""
        for at, tokens in ((now - 0.1, 5000.0), (now, 3.0)):
            page = EndpointMetrics(scraped_at=at, prompt_tokens=tokens, finished=tokens)
            self.picker.news.observe(name, page, now=at)

    def send(self, *, now: float) -> list[bytes]:
        """Return everything that it has to send now."""
        batches = []
        while (batch := self.exchange.next_batch(now=now)) is not None:
            batches.append(batch)
        return batches

    def receive(self, batches: Sequence[bytes], *, now: float, age_s: float = 0.0) -> None:
        for batch in batches:
            list(self.exchange.listener.apply(batch, now=now, age_s=age_s))
        self.check()

    def matched(self, prompt: bytes, *, now: float) -> dict[EndpointName, int]:
        """Return the tokens of the prompt that each endpoint is believed to hold. The lookup
        changes nothing.
        """
        probe = Replica(
            99, on=self.picker.news.endpoints(), policy=self.picker.policy, secret=self.picker.caches.secret
        )
        chain = probe.picker.caches.chain(InferenceRequest(kind=ApiKind.CHAT, model="m", prompt=prompt))
        return self.picker.caches.table.match(chain)

    def in_flight_of_peers(self) -> dict[str, int]:
        return {s.endpoint.name: s.peers_in_flight for s in self.picker.fleet.states() if s.peers_in_flight}

    def undone(self, *, now: float) -> float:
        """Return the prompt tokens that all servers still have to compute, as this picker sees it."""
        return sum(s.backlog.undone_tokens(now=now, rate=0.0) for s in self.picker.fleet.states())

    def check(self) -> None:
        check_picker(self.picker)
        check_exchange(self.exchange)


def meet(replicas: Sequence[Replica], *, now: float, rounds: int = 1) -> None:
    """Each picker sends everything and hears all others."""
    for _ in range(rounds):
        for speaker in replicas:
            batches = speaker.send(now=now)
            for listener in replicas:
                listener.receive(batches, now=now)
        now += 1.0


def two() -> tuple[Replica, Replica]:
    """Return two pickers that have met."""
    one, other = Replica(1), Replica(2)
    meet([one, other], now=0.0)
    return one, other
