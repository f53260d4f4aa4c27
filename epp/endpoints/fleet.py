"""Follows the source of endpoints, keeps the state of each endpoint, and says which of them may be picked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from epp.config.policy import PolicySpec
from epp.endpoints.answers import Answers
from epp.endpoints.columns import Columns
from epp.endpoints.failures import Failures
from epp.endpoints.prefill_rate import ModelRate, PrefillRate
from epp.endpoints.served_models import AwayModels, Named, Serving, forget_models, union
from epp.endpoints.state import EndpointState
from epp.endpoints.unreported import Unreported
from epp.errors import NoEndpointError, UnknownModelError
from epp.scheduling.snapshot import Snapshot
from epp.types import Address, Endpoint, EndpointName, ModelCard, ModelList

_KEPT_UNIONS: Final = 16
_NOT_READY: Final = (
    "no model server is ready for this model; check the endpoints file or the InferencePool's pods"
)


@dataclass(frozen=True, slots=True)
class FleetChange:
    added: tuple[EndpointName, ...]
    removed: tuple[EndpointName, ...]
    restarted: tuple[EndpointName, ...]
    """Endpoints with the same name but another process or address. The picker's knowledge of their caches is
    void.
    """


class Fleet:
    """The states of all endpoints, by name. The source checks that names and addresses are unique."""

    def __init__(self, spec: PolicySpec, *, refuses_unknown_models: bool = True) -> None:
        """Start without endpoints. refuses_unknown_models: once every server's list is known, a request for a
        model in none of the lists is the client's error.
        """
        self._spec = spec
        self._refuses = refuses_unknown_models
        self.unknown_asked = 0
        """Number of requests for a model that no list names. A server may have loaded the model since its
        last list.
        """
        self._states: dict[EndpointName, EndpointState] = {}
        self._by_address: dict[Address, EndpointState] = {}
        self._model_rates: dict[str, ModelRate] = {}
        self.models: AbstractSet[str] = frozenset()
        """The known base models of the servers. Callers only read them."""
        self.ranked = False
        """Whether some endpoints are ranks of a server."""
        self._prefilling: list[int] = []
        """Slots of endpoints that compute prompts for others."""
        self._serving = Serving((), (), everyone=range(0))
        """Which server serves which model. Kept, since every pick needs it."""
        self._away = AwayModels()
        self._pools: AbstractSet[str] = frozenset()
        """Pools that have servers."""
        self._unions: dict[frozenset[Address] | None, bytes | None] = {}
        """Answers to `GET /v1/models`, by subset."""
        self._aliases: Sequence[ModelCard] = ()
        self.answers = Answers()
        """The times when requests were sent and when their answers began, as the picker reports them."""
        self.failures = Failures(spec.failures, self.answers)
        """The servers that fail. The picker reports answers here, and people see the result."""
        self.unreported = Unreported()
        """The picks of other pickers that are not known here yet, as the listener's reports suggest."""
        self._in_slots: list[EndpointState] = []
        self._columns = Columns([])

    def apply(self, spec: PolicySpec) -> None:
        """Use another policy from now on."""
        self._spec, self.failures.settings = spec, spec.failures

    def __len__(self) -> int:
        return len(self._states)

    def in_use(self, name: EndpointName) -> bool:
        """Return whether a request was sent to the endpoint that the endpoint's last page may not show."""
        state = self.get(name)
        return state is not None and state.in_use

    def states(self) -> Iterable[EndpointState]:
        return self._states.values()

    @property
    def one_model(self) -> bool:
        """Whether every endpoint serves the same base model and the same adapters."""
        return self._serving.one_model

    def get(self, name: EndpointName) -> EndpointState | None:
        return self._states.get(name)

    def at(self, address: Address) -> EndpointState | None:
        return self._by_address.get(address)

    def set_endpoints(
        self,
        endpoints: Sequence[Endpoint],
        *,
        now: float,
        pools: AbstractSet[str] = frozenset(),
    ) -> FleetChange:
        """Follow the source's new list. States of endpoints that stay are kept.
        pools: the pools that exist, with or without endpoints.
        """
        wanted = {e.name: e for e in endpoints}
        removed = tuple(name for name in self._states if name not in wanted)
        added: list[EndpointName] = []
        restarted: list[EndpointName] = []
        for name in removed:
            gone = self._states.pop(name)
            gone.rate.leave()
            gone.gone = True
            self.failures.forget(gone)
            self._away.leave(gone.endpoint, gone.listed, now=now)
        self._away.keep(pools)
        for name, endpoint in wanted.items():
            state = self._states.get(name)
            if state is None:
                self._states[name] = self.new_state(endpoint, now=now)
                added.append(name)
                continue
            old, old_model = state.endpoint, state.model
            state.endpoint = endpoint
            if _process(old) != _process(endpoint):
                state.listed, state.asked = None, False
                self._reset(state, now=now)
                restarted.append(name)
            if old_model != state.model:
                self._new_rate(state)
        self._by_address = {s.endpoint.address: s for s in self._states.values()}
        self._in_slots = list(self._states.values())
        self._columns = Columns(self._in_slots)
        self._serving = self._index()
        self._pools = frozenset(s.endpoint.pool for s in self._in_slots)
        self.ranked = any(s.endpoint.rank is not None for s in self._in_slots)
        self._prefilling = [slot for slot, s in enumerate(self._in_slots) if s.endpoint.role.prefills]
        return FleetChange(added=tuple(added), removed=removed, restarted=tuple(restarted))

    def take_lists(
        self, lists: Mapping[EndpointName, ModelList | None], *, now: float
    ) -> Sequence[EndpointName]:
        """Take in the servers' lists of models. None: the server was asked, but did not list its models.
        Return the servers that list another base model than before. These count as other servers from now on.
        """
        restarted: list[EndpointName] = []
        renamed = changed = False
        for name, listed in lists.items():
            state = self._states.get(name)
            if state is None:
                continue
            changed = changed or not state.asked
            state.asked = True
            if listed is None or state.listed == listed:
                continue
            before, state.listed, changed = state.model, listed, True
            if state.model == before:
                continue
            renamed = True
            if before:
                self._reset(state, now=now)
                restarted.append(name)
            self._new_rate(state)
        if renamed:
            self._columns = Columns(self._in_slots)
        if changed:
            self._serving = self._index()
        return restarted

    def housekeep(self, *, now: float) -> None:
        """Do the work that must not delay a pick."""
        self._away.give_up(self._pools, now=now)

    def _reset(self, state: EndpointState, *, now: float) -> None:
        """Reset the state, because another process serves under this name."""
        state.forget_server(now=now)
        state.failures = 0
        self.failures.forget(state)

    def _index(self) -> Serving:
        self._unions.clear()
        self.models = {state.model for state in self._in_slots}
        forget_models(self._model_rates, self.models)
        self.unreported.forget(self.models)
        return Serving(
            [state.endpoint for state in self._in_slots],
            [state.listed for state in self._in_slots],
            everyone=self._columns.roster.everyone,
            unasked={slot for slot, state in enumerate(self._in_slots) if not state.asked},
        )

    def set_aliases(self, aliases: Sequence[str]) -> None:
        """Set the names that clients may use although no server lists them."""
        self._aliases = [ModelCard(name, owned_by="prefix-gateway") for name in aliases]
        self._unions.clear()

    def model_list(self, subset: frozenset[Address] | None = None) -> bytes | None:
        """Return the models of all servers together, as JSON. subset: only servers at these addresses. None:
        no server has listed its models.

        The answer is made once and kept until the lists change, because clients may ask for it as often as
        they like.
        """
        if subset not in self._unions:
            lists = [
                state.listed
                for state in self._in_slots
                if state.listed is not None and (subset is None or state.endpoint.address in subset)
            ]
            if len(self._unions) >= _KEPT_UNIONS:
                self._unions.clear()
            self._unions[subset] = union(lists, more=self._aliases) if lists else None
        return self._unions[subset]

    @property
    def unlisted(self) -> int:
        """The number of servers that have not listed their models yet."""
        return len(self._serving.unlisted)

    def new_state(self, endpoint: Endpoint, *, now: float) -> EndpointState:
        """Return a new state. Only the prefill rate is known: the rate of the model's other servers."""
        return EndpointState.new(endpoint, model_rate=self._model_rate(endpoint.model), now=now)

    def _new_rate(self, state: EndpointState) -> None:
        """Give the state a new rate, because the endpoint serves another model."""
        state.rate.leave()
        state.rate = PrefillRate(self._model_rate(state.model))

    def _model_rate(self, model: str) -> ModelRate:
        rate = self._model_rates.get(model)
        if rate is None:
            rate = self._model_rates[model] = ModelRate(start=self._spec.cost.prefill_tokens_per_second)
        return rate

    # -- for a pick ------------------------------------------------------------------------------------------

    def candidates(self, model: str, *, subset: AbstractSet[Address] | None) -> Sequence[int]:
        """Return the slots of the endpoints that may serve a request for `model`, at the addresses in
        `subset` if there is one.

        Raises NoEndpointError if there are none, and UnknownModelError if no server has such a model.
        """
        named = self._named(model)
        if named.answering is None or self.columns.holders(model):
            slots = self._serving.answering(self.serving(model))
        else:
            slots = named.answering
        slots = self.healthy(slots)
        if not slots:
            raise NoEndpointError(_NOT_READY, reason="no_ready_endpoint")
        if subset is None:
            return slots
        allowed = self._within(slots, subset)
        if not allowed:
            within = self._within(self._columns.roster.everyone, subset)
            if model and self._refuses and self._serving.none_serves(model, within):
                self.unknown_asked += 1
                raise UnknownModelError(model)
            raise NoEndpointError(
                "none of the endpoints that the data plane allows is ready", reason="subset_empty"
            )
        return allowed

    @property
    def disaggregated(self) -> bool:
        """Whether some endpoints compute prompts for others."""
        return bool(self._prefilling)

    def prefillers(self, model: str, *, subset: AbstractSet[Address] | None) -> Sequence[int]:
        """Return the slots of endpoints that may compute a prompt for `model` for another endpoint. May be
        empty.
        """
        able = set(self.serving(model))
        slots = [slot for slot in self._prefilling if slot in able]
        slots = list(self.healthy(slots))
        return slots if subset is None else self._within(slots, subset)

    def _within(self, slots: Sequence[int], subset: AbstractSet[Address]) -> list[int]:
        if self.ranked:
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
        snapshot = self.columns.snapshot(
            slots,
            adapter=adapter,
            adapter_slots=spec.lora.slots_per_endpoint,
            stale_after_s=spec.scrape.stale_after_seconds,
            now=now,
        )
        if self.unreported.of_models:
            unreported_picks = self.unreported.picks(snapshot.roster.models[slots[0]], now=now)
            snapshot = replace(snapshot, unreported_picks=unreported_picks)
        if not self.failures.marks:
            return snapshot
        return self.failures.onto(snapshot, model=model, settings=spec.failures, now=now)

    @property
    def columns(self) -> Columns:
        """The current state of every endpoint, by slot. Callers only read it."""
        columns = self._columns
        if columns.changed:
            columns.follow()
        return columns

    def in_slot(self, slot: int) -> EndpointState:
        return self._in_slots[slot]

    def healthy(self, slots: Sequence[int]) -> Sequence[int]:
        """Return the slots of `slots` that may be picked.

        If every endpoint's scrapes fail, the fault is probably in the scrapes. All slots then stay,
        and Envoy's retries find those that work.
        """
        failing = self.columns.failing(times=self._spec.scrape.failures_to_eject)
        if not failing or len(failing) == len(self._states):
            return slots
        return [slot for slot in slots if slot not in failing]

    def ready(self) -> set[EndpointState]:
        """Return all endpoints that may be picked, whatever models they serve."""
        everyone = self._columns.roster.everyone
        return {self._in_slots[slot] for slot in self.healthy(everyone)}

    def adapter(self, model: str) -> str:
        """Return `model` if some endpoint declares it as an adapter or was seen to hold it, else an empty
        text.
        """
        if self._named(model).declared:
            return model
        holders = self.columns.holders(model)
        if not holders:
            return ""
        models = self._columns.roster.models
        return model if any(models[slot] != model for slot in holders) else ""

    def _named(self, model: str) -> Named:
        return self._serving.named.get(model) or self._serving.look_up(model)

    def serving(self, model: str) -> Sequence[int]:
        """Return the slots of the servers that can serve `model`, ready or not.

        Raises UnknownModelError if every server says that it does not have the model, but NoEndpointError if
        servers of a pool that still exists had the model.
        """
        columns = self.columns
        try:
            return self._serving.slots(
                model, holders=columns.holders(model), bases=columns.roster.models, refuses=self._refuses
            )
        except UnknownModelError:
            self.unknown_asked += 1
            if model in self._away:
                raise NoEndpointError(_NOT_READY, reason="no_ready_endpoint") from None
            raise

    def check_integrity(self) -> None:
        assert set(self._by_address.values()) == set(self._states.values())
        assert self._in_slots == list(self._states.values())
        assert all(self._in_slots[slot].endpoint.role.prefills for slot in self._prefilling)
        assert self._columns.roster.models == [state.model for state in self._in_slots]
        assert self._pools == {state.endpoint.pool for state in self._in_slots}
        assert self.models == {state.model for state in self._in_slots}
        assert self.unlisted == sum(state.listed is None for state in self._in_slots)
        for name, state in self._states.items():
            assert state.endpoint.name == name
            assert state.in_flight >= 0
            assert state.peers_in_flight >= 0
            assert state.failures >= 0
            state.backlog.check_integrity()
        self._columns.check_integrity()
        self._serving.check_integrity()
        self._away.check_integrity()
        self.answers.check_integrity()
        self.failures.check_integrity()


def _process(endpoint: Endpoint) -> tuple[Address, str, str]:
    """Return the values that identify the serving process. If one differs, another process serves with
    another cache.
    """
    return endpoint.address, endpoint.incarnation, endpoint.model
