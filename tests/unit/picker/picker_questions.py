"""For the tests of the picker: a picker, and short forms of its callers' requests and reports."""

import random
from collections.abc import Sequence

from epp.base.types import Address, ApiKind, Endpoint, EndpointName, InferenceRequest
from epp.config.policy import API_VERSION, KIND, Metadata, Policy, PolicySpec
from epp.picker.decision import Question
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.events import Pick
from epp.picker.picker import Picker
from tests.invariants.picker import check_picker
from tests.unit.picker.endpoints.fleets import state_of

ADDRESSES = {name: Address(f"10.0.0.{i}", 8000) for i, name in enumerate("abcdefghi", start=1)}
A, B, C, D = (ADDRESSES[name] for name in "abcd")
ELSEWHERE = Address("10.9.9.9", 8000)


def endpoints(names: str, *, model: str = "", adapters: Sequence[str] = ()) -> list[Endpoint]:
    return [Endpoint(EndpointName(n), ADDRESSES[n], model=model, adapters=frozenset(adapters)) for n in names]


def policy_of(spec: PolicySpec, name: str = "test") -> Policy:
    return Policy(api_version=API_VERSION, kind=KIND, metadata=Metadata(name=name), spec=spec)


def a_picker(spec: PolicySpec = PolicySpec(), *, on: Sequence[Endpoint] = (), seed: int = 0) -> Picker:  # noqa: B008 - frozen
    picker = Picker(policy_of(spec), rng=random.Random(seed), unix_offset_s=1000.0)
    picker.news.set_endpoints(on or endpoints("abcd"), now=0.0)
    return picker


def text(name: str, size: int = 8000) -> bytes:
    """Return another text for every name, of exactly `size` bytes."""
    return random.Random(name).randbytes(size // 2).hex().encode() + b"." * (size % 2)


def ask(
    prompt: bytes = b"",
    *,
    model: str = "m",
    salt: str = "",
    stream: bool = False,
    kind: ApiKind = ApiKind.COMPLETIONS,
    token_ids: bool = False,
    subset: frozenset[Address] | None = None,
    prescribed: tuple[Address, ...] | None = None,
    session: str = "",
    body_bytes: int = 0,
) -> Question:
    inference = InferenceRequest(
        kind=kind, model=model, prompt=prompt, cache_salt=salt, stream=stream, token_ids=token_ids
    )
    return Question(
        request_id="r",
        inference=inference,
        body_bytes=body_bytes,
        subset=subset,
        session=session,
        prescribed=prescribed,
    )


def serve(picker: Picker, request: Question, *, now: float, status: int = 200) -> Pick:
    """Route one request and end it half a second later."""
    pick = picker.pick(request, now=now)
    picker.on_response_headers(pick, status=status, served=pick.destinations[0], now=now + 0.4)
    picker.end(pick, outcome="ended", now=now + 0.5)
    check_picker(picker)
    return pick


def state(picker: Picker, name: str) -> EndpointState:
    return state_of(picker.fleet, name)


def in_flight(picker: Picker) -> dict[str, int]:
    return {s.endpoint.name: s.in_flight for s in picker.fleet.states() if s.in_flight}


def undone(picker: Picker, name: str, *, now: float) -> float:
    found = state(picker, name)
    return found.backlog.undone_tokens(now=now, rate=found.tokens_per_s)


def held_bytes(picker: Picker, name: str) -> int:
    return picker.caches.table.mirrors[EndpointName(name)].used_bytes
