"""Follows the sources: keeps a state for each endpoint, the servers' lists of models, and the prefill rate of
each model.

A usual request runs no code of this module. It reads the results by what `Fleet` inherits from
`columns.FleetView`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from epp.base.types import Address, Endpoint, EndpointName, ModelCard, ModelList
from epp.config.policy import PolicySpec
from epp.picker.endpoints.columns import Columns, FleetView
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.prefill_rate import ModelRate, PrefillRate
from epp.picker.endpoints.served_models import Serving, forget_models, of_page, union

_KEPT_UNIONS: Final = 16


@dataclass(frozen=True, slots=True)
class FleetChange:
    added: tuple[EndpointName, ...]
    removed: tuple[EndpointName, ...]
    restarted: tuple[EndpointName, ...]
    """Endpoints with the same name but another process or address. The picker's knowledge of their caches is
    void.
    """


class Fleet(FleetView):
    """The states of all endpoints, by name. The source checks that names and addresses are unique."""

    def __init__(self, spec: PolicySpec, *, refuses_unknown_models: bool = True) -> None:
        super().__init__(spec, refuses_unknown_models=refuses_unknown_models)
        self._model_rates: dict[str, ModelRate] = {}
        self.models: AbstractSet[str] = frozenset()
        """The known base models of the servers. Callers only read them."""
        self._pools: AbstractSet[str] = frozenset()
        """Pools that have servers."""
        self._unions: dict[frozenset[Address] | None, bytes | None] = {}
        """Answers to `GET /v1/models`, by subset."""
        self._aliases: Mapping[str, frozenset[str]] = {}

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

    def set_endpoints(
        self, endpoints: Sequence[Endpoint], *, now: float, pools: AbstractSet[str] = frozenset()
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
            if old.process != endpoint.process:
                state.listed = None
                self._reset(state, now=now)
                restarted.append(name)
            if old_model != state.model:
                self._new_rate(state)
        self._by_address = {s.endpoint.address: s for s in self._states.values()}
        self._in_slots = list(self._states.values())
        self._columns = Columns(self._in_slots)
        self._index()
        self._pools = frozenset(s.endpoint.pool for s in self._in_slots)
        self.ranked = any(s.endpoint.rank is not None for s in self._in_slots)
        self._prefilling = [slot for slot, s in enumerate(self._in_slots) if s.endpoint.role.prefills]
        return FleetChange(added=tuple(added), removed=removed, restarted=tuple(restarted))

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
                self._reset(state, now=now)
                restarted.append(name)
            self._new_rate(state)
        if renamed:
            self._columns = Columns(self._in_slots)
        if changed:
            self._index()
        return restarted

    def housekeep(self, *, now: float) -> None:
        """Do the work that must not delay a pick."""
        self._away.give_up(self._pools, now=now)

    def _reset(self, state: EndpointState, *, now: float) -> None:
        """Reset the state, because another process serves under this name."""
        state.forget_server(now=now)
        state.failures = 0
        self.failures.forget(state)

    def _index(self) -> None:
        """Make the index of servers by model, and forget the models that no server has any more."""
        self._unions.clear()
        self.models = {state.model for state in self._in_slots}
        forget_models(self._model_rates, self.models)
        self.unreported.forget(self.models)
        self._serving = Serving(
            [state.endpoint for state in self._in_slots],
            [state.listed for state in self._in_slots],
            everyone=self._columns.roster.everyone,
        )

    def set_aliases(self, aliases: Mapping[str, frozenset[str]]) -> None:
        """Set the names that clients may use although no server lists them, each with its targets."""
        self._aliases = aliases
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
                if state.listed is not None
                and state.listed.whole
                and (subset is None or state.endpoint.address in subset)
            ]
            if len(self._unions) >= _KEPT_UNIONS:
                self._unions.clear()
            self._unions[subset] = union(lists, more=self._answered_aliases()) if lists else None
        return self._unions[subset]

    def listed_names(self) -> frozenset[str] | None:
        """Return every name that a server lists. None: not every server has given its list."""
        lists = [state.listed for state in self._in_slots]
        whole = [each.names for each in lists if each is not None and each.whole]
        return frozenset().union(*whole) if whole and len(whole) == len(lists) else None

    def _answered_aliases(self) -> Iterator[ModelCard]:
        """Yield the aliases for which some server has a target, as far as the lists are known."""
        names = self.listed_names()
        for alias, targets in self._aliases.items():
            if names is None or not names.isdisjoint(targets):
                yield ModelCard(alias, owned_by="prefix-gateway")

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

    def ready(self) -> set[EndpointState]:
        """Return all endpoints that may be picked, whatever models they serve."""
        everyone = self._columns.roster.everyone
        return {self._in_slots[slot] for slot in self.healthy(everyone)}

    def check_integrity(self) -> None:
        assert set(self._by_address.values()) == set(self._states.values())
        assert self._in_slots == list(self._states.values())
        assert all(self._in_slots[slot].endpoint.role.prefills for slot in self._prefilling)
        assert self._columns.roster.models == [state.model for state in self._in_slots]
        assert self._pools == {state.endpoint.pool for state in self._in_slots}
        assert self.models == {state.model for state in self._in_slots}
        listed = (state.listed for state in self._in_slots)
        assert self.unlisted == sum(one is None or not one.whole for one in listed)
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
        self.unreported.check_integrity()
