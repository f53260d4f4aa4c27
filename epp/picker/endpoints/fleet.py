"""Keeps a state for each endpoint, the prefill rate of each model, and what picks read of them: which
endpoints a request may go to, and the snapshot for the rule.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import exp
from typing import Any

from msgspec.structs import replace

from epp.base.errors import NoEndpointError, NotReadyError
from epp.base.types import Address, Endpoint, EndpointName, ModelList
from epp.config.policy import PolicySpec
from epp.picker.endpoints.answers import Answers
from epp.picker.endpoints.columns import Columns
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.failures import FailingServers
from epp.picker.endpoints.prefill_rate import ModelRate, PrefillRate
from epp.picker.endpoints.served_models import ServedModels, forget_models, of_page
from epp.picker.scheduling.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class FleetChange:
    added: list[EndpointState]
    removed: list[EndpointState]
    restarted: list[EndpointState]
    """Endpoints with the same name but another process or address. The picker's knowledge of their caches is
    void.
    """


class Unreported:
    """Estimates how many requests other pickers have sent lately that this picker does not know of yet, by
    base model. No estimate is below 0.

    Each request is reported some time after it was sent. By Little's law the number of requests that are not
    reported yet is their rate times this delay. So the estimate is the sum of the delays of all reports of
    about the last second. The listener of `sharing` passes in each report, and picks read the estimate.
    """

    __slots__ = ("of_models",)

    def __init__(self) -> None:
        self.of_models: dict[str, tuple[float, float]] = {}
        """The estimate for each base model, and when it was made. Empty: pickers do not share."""

    def reported(self, model: str, *, age_s: float, now: float) -> None:
        """Count a request for this base model that another picker has reported now and sent `age_s` ago. A
        report that is older than a second came after an interruption, so it counts as a second old.
        """
        picks = self.picks(model, now=now) + min(max(age_s, 0.0), 1.0)
        self.of_models[model] = picks, now

    def picks(self, model: str, *, now: float) -> float:
        """Return the estimate. 0 where pickers do not share."""
        known = self.of_models.get(model)
        if known is None:
            return 0.0
        picks, at = known
        return picks * exp(min(0.0, at - now))


class Fleet:
    """The states of all endpoints, by name, and in the order of their slots. The source checks that names and
    addresses are unique.
    """

    def __init__(self, spec: PolicySpec, *, refuses_unknown_models: bool = True) -> None:
        """Start without endpoints. refuses_unknown_models: see `ServedModels`."""
        self._spec = spec
        self._states: dict[EndpointName, EndpointState] = {}
        self.served = ServedModels(refuses_unknown=refuses_unknown_models)
        self.answers = Answers()
        """What the servers answered, as the picker reports it."""
        self.failures = FailingServers(spec.failures, self.answers)
        """The servers that fail. The picker reports answers here, and people see the result."""
        self.unreported = Unreported()
        """The picks of other pickers that are not known here yet, as the listener's reports suggest."""
        self._model_rates: dict[str, ModelRate] = {}
        self._follow()

    def apply(self, spec: PolicySpec) -> None:
        """Use another policy from now on."""
        self._spec, self.failures.settings = spec, spec.failures

    def __len__(self) -> int:
        return len(self._states)

    def in_use(self, name: EndpointName) -> bool:
        """Return whether a request was sent to the endpoint that the endpoint's last page may not show."""
        state = self.get(name)
        return state is not None and state.loads[1] + state.picks_since_scrape > 0

    def states(self) -> Iterable[EndpointState]:
        return self._states.values()

    def set_endpoints(
        self, endpoints: Sequence[Endpoint], *, now: float, pools: AbstractSet[str] = frozenset()
    ) -> FleetChange:
        """Follow the source's new list. States of endpoints that stay are kept.
        pools: the pools that exist, with or without endpoints.
        """
        wanted = {e.name: e for e in endpoints}
        change = FleetChange([], [state for name, state in self._states.items() if name not in wanted], [])
        for gone in change.removed:
            del self._states[gone.endpoint.name]
            gone.rate.model.leave(gone.rate)
            gone.gone, gone.slot = True, -1
            self.failures.forget(gone)
            self.served.away.leave(gone.endpoint, gone.listed, now=now)
        self.served.away.keep(pools)
        for name, endpoint in wanted.items():
            state = self._states.get(name)
            if state is None:
                self._states[name] = self.new_state(endpoint)
                change.added.append(self._states[name])
                continue
            old, old_model = state.endpoint, state.model
            state.endpoint = endpoint
            if old.process != endpoint.process:
                state.listed = None
                self.reset(state, now=now)
                change.restarted.append(state)
            if old_model != state.model:
                state.rate.model.leave(state.rate)
                state.rate = self._rate(state.model)
        self._follow()
        return change

    def _follow(self) -> None:
        """Derive from the states what picks read, since endpoints or their models are others now."""
        states = self._in_slots = list(self._states.values())
        self._by_address = {state.endpoint.address: state for state in states}
        self._columns = Columns(states)
        self._ranked = any(state.endpoint.rank is not None for state in states)
        self.prefilling = [slot for slot, state in enumerate(states) if state.endpoint.role.prefills]
        """Slots of endpoints that compute prompts for others. Callers only read them, and `models`."""
        self.models: AbstractSet[str] = {state.model for state in states}
        """The known base models of the servers."""
        forget_models(self._model_rates, self.models)
        forget_models(self.unreported.of_models, self.models)
        self.served.follow(states, self._columns)

    def take_lists(
        self, lists: Mapping[EndpointName, ModelList | None], *, now: float
    ) -> Sequence[EndpointName]:
        """Take in the servers' lists of models. None: the server was asked, but did not list its models. The
        names on its metrics page then stand for a list that was never known. Return the servers that list
        another base model than before. These count as other servers from now on.
        """
        restarted: list[EndpointName] = []
        renamed = changed = False
        for name, given in lists.items():
            state = self._states.get(name)
            if state is None:
                continue
            state.gives_no_list = given is None
            unknown = state.listed is None or not state.listed.whole
            listed = of_page(state.metrics) if given is None and unknown else given
            if listed is None or state.listed == listed:
                continue
            before, state.listed, changed = state.model, listed, True
            if state.model == before:
                continue
            renamed = True
            if before:
                self.reset(state, now=now)
                restarted.append(name)
            state.rate.model.leave(state.rate)
            state.rate = self._rate(state.model)
        if renamed:
            self._follow()
        elif changed:
            self.served.follow(self._in_slots, self._columns)
        return restarted

    def housekeep(self, *, now: float) -> None:
        """Do the work that must not delay a pick."""
        self.served.away.give_up({state.endpoint.pool for state in self._in_slots}, now=now)

    def reset(self, state: EndpointState, *, now: float) -> None:
        """Reset the state, because another process serves under this name."""
        state.forget_server(now=now)
        self.failures.forget(state)

    def new_state(self, endpoint: Endpoint) -> EndpointState:
        """Return a new state. Only the prefill rate is known: the rate of the model's other servers."""
        return EndpointState(endpoint, self._rate(endpoint.model))

    def _rate(self, model: str) -> PrefillRate:
        start = self._spec.cost.prefill_tokens_per_second
        return PrefillRate(self._model_rates.setdefault(model, ModelRate(start=start)))

    # -- for picks -------------------------------------------------------------------------------------------

    def get(self, name: EndpointName) -> EndpointState | None:
        return self._states.get(name)

    def at(self, address: Address) -> EndpointState | None:
        return self._by_address.get(address)

    def in_slot(self, slot: int) -> EndpointState:
        return self._in_slots[slot]

    @property
    def columns(self) -> Columns:
        """The current state of every endpoint, by slot. Callers only read it."""
        columns = self._columns
        if columns.changed:
            columns.follow()
        return columns

    def candidates(self, model: str, *, subset: AbstractSet[Address] | None) -> Sequence[int]:
        """Return the slots of the endpoints that may serve a request for `model`, at the addresses in
        `subset` if there is one.

        Raises NotReadyError if there are none, NoEndpointError if there are none in the subset, and
        UnknownModelError if no server has such a model.
        """
        slots = self.healthy(self.served.answering(model))
        if not slots:
            raise NotReadyError
        if subset is None:
            return slots
        allowed = self._within(slots, subset)
        if not allowed:
            # The subset has no server that lists the model, but one that lists nothing may have it.
            within = self._within(self._columns.roster.everyone, subset)
            allowed = list(self.healthy(self.served.within(model, within)))
        if not allowed:
            raise NoEndpointError(
                "none of the endpoints that the data plane allows is ready", reason="subset_empty"
            )
        return allowed

    def prefillers(self, model: str, *, subset: AbstractSet[Address] | None) -> Sequence[int]:
        """Return the slots of endpoints that may compute a prompt for `model` for another endpoint. May be
        empty.
        """
        able = set(self.served.slots(model))
        slots = list(self.healthy([slot for slot in self.prefilling if slot in able]))
        return slots if subset is None else self._within(slots, subset)

    def _within(self, slots: Sequence[int], subset: AbstractSet[Address]) -> list[int]:
        if self._ranked:
            addresses = self._columns.roster.addresses
            return [slot for slot in slots if addresses[slot] in subset]
        allowed = {state.slot for a in subset if (state := self._by_address.get(a)) is not None}
        return [slot for slot in slots if slot in allowed]

    def snapshot(
        self, slots: Sequence[int], *, model: str, adapter: str, spec: PolicySpec, now: float
    ) -> Snapshot:
        """Return the snapshot of some slots for a request for `model`. adapter: equal to `model` if that is
        an adapter, else empty.
        """
        noes = self.answers.noes(now=now)
        snapshot = self.columns.snapshot(slots, adapter=adapter, spec=spec, now=now)
        more: dict[str, Any] = {}
        if self.unreported.of_models:
            more["unreported_picks"] = self.unreported.picks(snapshot.roster.models[slots[0]], now=now)
        if noes:
            more |= self.columns.noes(snapshot, now=now)
        if self.failures.marks:
            more |= self.failures.seen(snapshot, model=model, settings=spec.failures, now=now)
        return replace(snapshot, **more) if more else snapshot

    def healthy(self, slots: Sequence[int]) -> Sequence[int]:
        """Return the slots of `slots` that may be picked: servers that sleep would let a request wait.

        If every endpoint's scrapes fail, the fault is probably in the scrapes. All slots then stay,
        and Envoy's retries find those that work. A server that has never given a page is out after one failed
        scrape, unless no other slot is left: the page of a busy server may be late once.
        """
        columns, times = self.columns, self._spec.scrape.failures_to_eject
        failing = columns.failing(times=times, times_of_new=1)
        if len(failing) == len(self._states):
            return slots
        out = failing | columns.asleep
        left = [slot for slot in slots if slot not in out] if out else slots
        if not left:
            out = columns.failing(times=times, times_of_new=times) | columns.asleep
            left = [slot for slot in slots if slot not in out]
        return left

    def ready(self) -> set[EndpointState]:
        """Return all endpoints that may be picked, whatever models they serve."""
        everyone = self._columns.roster.everyone
        return {self._in_slots[slot] for slot in self.healthy(everyone)}
