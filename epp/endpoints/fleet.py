"""The set of endpoints: follows its source, keeps each one's state, and tells which may be picked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from epp.config.policy import PolicySpec
from epp.endpoints.columns import Columns
from epp.endpoints.failures import Failures
from epp.endpoints.prefill_rate import ModelRate, PrefillRate
from epp.endpoints.state import EndpointState
from epp.errors import NoEndpointError
from epp.scheduling.snapshot import Snapshot
from epp.types import Address, Endpoint, EndpointName


@dataclass(frozen=True, slots=True)
class FleetChange:
    """What a new list of endpoints changed."""

    added: tuple[EndpointName, ...]
    removed: tuple[EndpointName, ...]
    restarted: tuple[EndpointName, ...]
    """Same name, another process or address: nothing that was known of its cache holds."""


class Fleet:
    """States by name. Names and addresses are unique; the source checks that."""

    def __init__(self) -> None:
        self._states: dict[EndpointName, EndpointState] = {}
        self._by_address: dict[Address, EndpointState] = {}
        self._model_rates: dict[str, ModelRate] = {}
        # What the source says of models, kept since every pick asks for it; made anew with each list of endpoints.
        self._declared: frozenset[str] = frozenset()
        """Every adapter that some endpoint declares."""
        self._no_answers: frozenset[int] = frozenset()
        """Slots of those that are never a destination."""
        self._prefilling: list[int] = []
        """Slots of those that compute prompts for others."""
        self._able: dict[str, list[int]] = {}
        """By base model or declared adapter, the slots of those that serve it."""
        self.failures = Failures()
        """Who answers badly, for the picker to tell and people to read."""
        self._in_slots: list[EndpointState] = []
        self._columns = Columns([])

    def __len__(self) -> int:
        return len(self._states)

    def in_use(self, name: EndpointName) -> bool:
        """Whether anything was sent to the endpoint that its last page may not show."""
        state = self.get(name)
        return state is not None and state.in_use

    def states(self) -> Iterable[EndpointState]:
        return self._states.values()

    @property
    def one_model(self) -> bool:
        """Every endpoint serves the same base model, and declares the same adapters."""
        return all(len(slots) == len(self._states) for slots in self._able.values())

    def get(self, name: EndpointName) -> EndpointState | None:
        return self._states.get(name)

    def at(self, address: Address) -> EndpointState | None:
        return self._by_address.get(address)

    def set_endpoints(self, endpoints: Sequence[Endpoint], *, spec: PolicySpec, now: float) -> FleetChange:
        """Follow the source's new list; states of endpoints that stay are kept."""
        wanted = {e.name: e for e in endpoints}
        removed = tuple(name for name in self._states if name not in wanted)
        added: list[EndpointName] = []
        restarted: list[EndpointName] = []
        for name in removed:
            self.failures.forget(self._states.pop(name))
        for name, endpoint in wanted.items():
            state = self._states.get(name)
            if state is None:
                self._states[name] = self.new_state(endpoint, spec=spec, now=now)
                added.append(name)
                continue
            old = state.endpoint
            state.endpoint = endpoint
            if _process(old) != _process(endpoint):
                state.forget_server(now=now)
                state.failures = 0
                self.failures.forget(state)
                restarted.append(name)
            if old.model != endpoint.model:
                state.rate = PrefillRate(self._model_rate(endpoint.model, spec=spec))
        self._by_address = {s.endpoint.address: s for s in self._states.values()}
        self._declared = frozenset(a for e in wanted.values() for a in e.adapters)
        self._in_slots = list(self._states.values())
        self._columns = Columns(self._in_slots)
        self._able = self._by_model()
        self._no_answers = frozenset(
            slot for slot, s in enumerate(self._in_slots) if not s.endpoint.role.answers
        )
        self._prefilling = [slot for slot, s in enumerate(self._in_slots) if s.endpoint.role.prefills]
        return FleetChange(added=tuple(added), removed=removed, restarted=tuple(restarted))

    def new_state(self, endpoint: Endpoint, *, spec: PolicySpec, now: float) -> EndpointState:
        """A state that nothing is known about, but for the rate of its model's other servers."""
        return EndpointState.new(endpoint, model_rate=self._model_rate(endpoint.model, spec=spec), now=now)

    def _model_rate(self, model: str, *, spec: PolicySpec) -> ModelRate:
        rate = self._model_rates.get(model)
        if rate is None:
            rate = self._model_rates[model] = ModelRate(start=spec.cost.prefill_tokens_per_second)
        return rate

    # -- for a pick ----------------------------------------------------------------------------------------------

    def candidates(
        self, model: str, *, subset: AbstractSet[Address] | None, failures_to_eject: int
    ) -> Sequence[int]:
        """Slots of those that may serve a request for `model`, of the addresses in `subset` if there is one.

        NoEndpointError: there are none.
        """
        slots = self.serving(model) if model else self._columns.roster.everyone
        if self._no_answers:
            slots = [slot for slot in slots if slot not in self._no_answers]
        slots = self.healthy(slots, failures_to_eject=failures_to_eject)
        if not slots:
            raise NoEndpointError(
                "no model server is ready for this model; check the endpoints file or the InferencePool's pods",
                reason="no_ready_endpoint",
            )
        if subset is None:
            return slots
        allowed = self._within(slots, subset)
        if not allowed:
            raise NoEndpointError(
                "none of the endpoints that the data plane allows is ready", reason="subset_empty"
            )
        return allowed

    @property
    def disaggregated(self) -> bool:
        """Some endpoints compute prompts for others."""
        return bool(self._prefilling)

    def prefillers(
        self, model: str, *, subset: AbstractSet[Address] | None, failures_to_eject: int
    ) -> Sequence[int]:
        """Slots of those that may compute a prompt for `model` that another answers; perhaps none."""
        able = set(self.serving(model)) if model else set(self._columns.roster.everyone)
        slots = [slot for slot in self._prefilling if slot in able]
        slots = list(self.healthy(slots, failures_to_eject=failures_to_eject))
        return slots if subset is None else self._within(slots, subset)

    def _within(self, slots: Sequence[int], subset: AbstractSet[Address]) -> list[int]:
        allowed = {state.slot for a in subset if (state := self._by_address.get(a)) is not None}
        return [slot for slot in slots if slot in allowed]

    def snapshot(
        self, slots: Sequence[int], *, model: str, adapter: str, spec: PolicySpec, now: float
    ) -> Snapshot:
        """What rules may know of some slots for a request for `model`; `adapter`: the same if it is one, else empty."""
        snapshot = self._followed().snapshot(
            slots,
            adapter=adapter,
            adapter_slots=spec.lora.slots_per_endpoint,
            stale_after_s=spec.scrape.stale_after_seconds,
            now=now,
        )
        return self.failures.onto(snapshot, model=model, settings=spec.failures, now=now)

    @property
    def columns(self) -> Columns:
        """For reading: what every endpoint's state says now, by slot."""
        return self._followed()

    def in_slot(self, slot: int) -> EndpointState:
        return self._in_slots[slot]

    def healthy(self, slots: Sequence[int], *, failures_to_eject: int) -> Sequence[int]:
        """Those of `slots` that may be picked.

        When every endpoint's scrapes fail, the scrapes are the likelier fault: all stay, and Envoy's retries sort them.
        """
        failing = self._followed().failing(times=failures_to_eject)
        if not failing or len(failing) == len(self._states):
            return slots
        return [slot for slot in slots if slot not in failing]

    def ready(self, *, failures_to_eject: int) -> set[EndpointState]:
        """All that may be picked, whatever they serve."""
        everyone = self._columns.roster.everyone
        return {self._in_slots[slot] for slot in self.healthy(everyone, failures_to_eject=failures_to_eject)}

    def adapter(self, model: str) -> str:
        """`model` if it is an adapter that some endpoint declares or was seen to hold, else the empty string."""
        if model in self._declared:
            return model
        holders = self._followed().holders(model)
        if not holders:
            return ""
        models = self._columns.roster.models
        return model if any(models[slot] != model for slot in holders) else ""

    def serving(self, model: str) -> Sequence[int]:
        """Slots of those that can serve `model`, ready or not: as base model or adapter, where any endpoint says so; else all.

        An adapter that no source declares but a server was seen to hold can be on any server of the same base model:
        having seen it once must not tie it to that server for good.
        """
        everyone = self._columns.roster.everyone
        able = self._able.get(model, ())
        if len(able) == len(everyone):
            return everyone
        holders = sorted(self._followed().holders(model))
        if able:
            declared = set(able)
            return [*able, *(slot for slot in holders if slot not in declared)]
        models = self._columns.roster.models
        bases = {models[slot] for slot in holders}
        return [slot for slot in everyone if models[slot] in bases] if bases else everyone

    def _followed(self) -> Columns:
        columns = self._columns
        if columns.changed:
            columns.follow()
        return columns

    def _by_model(self) -> dict[str, list[int]]:
        able: dict[str, list[int]] = {}
        for slot, state in enumerate(self._states.values()):
            for model in state.endpoint.adapters | {state.endpoint.model}:
                able.setdefault(model, []).append(slot)
        return able

    def check_integrity(self) -> None:
        """Assert that the indexes agree and every state is sound."""
        assert set(self._by_address.values()) == set(self._states.values())
        assert self._in_slots == list(self._states.values())
        assert self._able == self._by_model()
        assert all(not self._in_slots[slot].endpoint.role.answers for slot in self._no_answers)
        assert all(self._in_slots[slot].endpoint.role.prefills for slot in self._prefilling)
        assert self._declared == {a for s in self._states.values() for a in s.endpoint.adapters}
        for name, state in self._states.items():
            assert state.endpoint.name == name
            assert state.in_flight >= 0
            assert state.peers_in_flight >= 0
            assert state.failures >= 0
            state.backlog.check_integrity()
        self._columns.check_integrity()
        self.failures.check_integrity()


def _process(endpoint: Endpoint) -> tuple[Address, str, str]:
    """What tells one serving process from the next: another of these, and its cache is another's, too."""
    return endpoint.address, endpoint.incarnation, endpoint.model
