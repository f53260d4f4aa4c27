"""The endpoints as a pick sees them: which of them a request may go to, and the snapshot for the rule.

`Columns` holds the numbers of all endpoints: one array for each kind of number, with one slot for each
endpoint, in the order of the fleet. A pick computes with these arrays instead of looping over objects, so a
thousand endpoints cost little more than four. An `EndpointState` owns all knowledge of its endpoint. When the
state changes, it notes its slot in `changed`, and the next reader copies the rows of these slots. An unknown
value is NaN here and None in the state.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

import numpy as np
from msgspec.structs import replace

from epp.base.errors import NoEndpointError, NotReadyError
from epp.base.types import Address, Endpoint, EndpointMetrics, EndpointName
from epp.config.policy import PolicySpec
from epp.picker.endpoints.answers import LATELY_S, Answers
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.failures import FailingServers
from epp.picker.endpoints.prefill_rate import ModelRate, PrefillRate
from epp.picker.endpoints.served_models import ServedModels, forget_models
from epp.picker.endpoints.unreported import Unreported
from epp.picker.scheduling.snapshot import Floats, Ints, Roster, Snapshot


class Columns:
    """The columns of one list of endpoints. All arrays are as long as the roster. They have no values until
    the first `follow`.
    """

    def __init__(self, states: Sequence[EndpointState]) -> None:
        n = len(states)
        self._states = states
        self.roster = Roster([state.endpoint for state in states], models=[state.model for state in states])
        self.changed: set[int] = set(range(n))
        """Slots of the states that have changed since their rows were copied."""
        self.block_tokens: Ints = np.ones(n + 1, dtype=np.int64)
        """Tokens of a KV block. 1 if the server does not say. The last place is for servers
        without a slot."""
        # These columns change with every request. They are written as memoryviews, since numpy writes three
        # times as slowly. The undone tokens drain at the prefill rate from the time beside them. The load is
        # that by the last metrics and the events since then, and the known load what pickers know of.
        requests: Floats = np.empty((7, n))
        self._undone_tokens, self._undone_at, self._load, self._known_load, *noes = requests
        self._noes, self._no_tokens, self._no_token_at = noes
        self._rows = [cast("memoryview[float]", column.data) for column in requests]
        pages: Floats = np.empty((5, n))
        self._scraped_at, self._max_adapters, self._slowness, self._waiting, self._kv_usage = pages
        self._pages_now = pages[3:]
        """Two columns that snapshots show: the queues, and the shares of the KV caches in use."""
        self._oldest_scrape = -np.inf
        """The time of the oldest metrics."""
        self._pages_seen = tuple(self._pages_now)
        """Copies of these columns for snapshots. No code writes to them."""
        self._most = [np.inf, np.inf]
        """The largest value of each of these columns. No candidate has a larger one."""
        self._adapters: Floats = np.zeros(n)
        """Number of adapters loaded."""
        self._loaded: list[AbstractSet[str]] = [frozenset()] * n
        self._holders: dict[str, set[int]] = {}
        """For each adapter, the slots of the servers that hold it."""
        self.failed: set[int] = set()
        """Slots of the servers whose last scrapes failed."""
        self.asleep: set[int] = set()
        """Slots of the servers that say that they sleep."""
        self._pages: list[EndpointMetrics | None] = [None] * n
        self._models: list[ModelRate] = list({id(s.rate.model): s.rate.model for s in states}.values())
        number = {id(model): k for k, model in enumerate(self._models)}
        self._model_of: Ints = np.array([number[id(s.rate.model)] for s in states], dtype=np.int64)
        self._rate: Floats = np.empty(n)
        self._rates_known = False
        for slot, state in enumerate(states):
            state.slot, state.changed = slot, self.changed

    # -- following the states --------------------------------------------------------------------------------

    def follow(self) -> None:
        changed = list(self.changed)
        self.changed.clear()  # `pop` would search the whole room of a set that once had every slot
        for slot in changed:
            self._copy(slot)
        if not self._rates_known:
            # A page changes the rate of its server, and so of every server of the same model.
            per_model = np.array([model.tokens_per_s for model in self._models])
            self._rate = per_model[self._model_of] / self._slowness
            self._pages_seen = tuple(self._pages_now.copy())
            self._most = np.fmax.reduce(self._pages_now, axis=1, initial=-np.inf).tolist()
            self._oldest_scrape = float(self._scraped_at.min(initial=np.inf))
            self._rates_known = True

    def _copy(self, slot: int) -> None:
        state = self._states[slot]
        metrics, account = state.metrics, state.account
        undone_tokens, undone_at, load, known_load, noes, no_tokens, no_token_at = self._rows
        undone_tokens[slot], undone_at[slot] = state.backlog.undone
        load[slot], known_load[slot] = state.loads
        noes[slot], no_tokens[slot], no_token_at[slot] = account.noes, account.no_tokens, account.no_token_at
        if metrics is not self._pages[slot] or not self._rates_known:
            self._copy_page(slot, state, metrics)
        if state.failures:
            self.failed.add(slot)
        elif self.failed:
            self.failed.discard(slot)
        expected = state.adapters or state.expected_adapters
        if expected or self._loaded[slot] or (metrics is not None and metrics.known_adapters):
            self._copy_adapters(slot, state.loaded_adapters)

    def _copy_page(self, slot: int, state: EndpointState, metrics: EndpointMetrics | None) -> None:
        self._pages[slot] = metrics
        self._rates_known = False
        if metrics is not None and metrics.asleep:
            self.asleep.add(slot)
        else:
            self.asleep.discard(slot)
        self._slowness[slot] = state.rate.slowness
        self._scraped_at[slot] = metrics.scraped_at if metrics else -np.inf
        self._waiting[slot] = np.nan if metrics is None or metrics.waiting is None else metrics.waiting
        self._kv_usage[slot] = np.nan if metrics is None or metrics.kv_usage is None else metrics.kv_usage
        self.block_tokens[slot] = (metrics.block_size if metrics else None) or 1
        self._max_adapters[slot] = (metrics.max_lora if metrics else None) or np.nan

    def _copy_adapters(self, slot: int, loaded: AbstractSet[str]) -> None:
        before = self._loaded[slot]
        if loaded == before:
            return
        for adapter in before - loaded:
            holders = self._holders[adapter]
            holders.remove(slot)
            if not holders:
                del self._holders[adapter]
        for adapter in loaded - before:
            self._holders.setdefault(adapter, set()).add(slot)
        self._loaded[slot] = loaded
        self._adapters[slot] = len(loaded)

    # -- reading; the caller has called `follow` -------------------------------------------------------------

    def holders(self, adapter: str) -> AbstractSet[int]:
        """Return the slots of the servers that hold the adapter, as far as we know."""
        if self.changed:
            self.follow()
        return self._holders.get(adapter, set())

    def snapshot(self, slots: Sequence[int], *, adapter: str, spec: PolicySpec, now: float) -> Snapshot:
        """Return a snapshot of some slots. The snapshot never changes."""
        stale_after_s = spec.scrape.stale_after_seconds
        undone = np.maximum(self._undone_tokens - self._rate * (now - self._undone_at), 0.0)
        if now - self._oldest_scrape <= stale_after_s:
            load, (waiting, kv_usage) = self._load.copy(), self._pages_seen
        else:
            fresh = now - self._scraped_at <= stale_after_s
            load = np.where(fresh, self._load, self._known_load)
            waiting, kv_usage = (np.where(fresh, known, np.nan) for known in self._pages_seen)
        has_adapter = free_slot = None
        if adapter:
            has_adapter = np.zeros(len(self._states), dtype=np.bool_)
            has_adapter[list(self.holders(adapter))] = True
            room = np.where(np.isnan(self._max_adapters), spec.lora.slots_per_endpoint, self._max_adapters)
            free_slot = self._adapters < room
        everyone = self.roster.everyone
        whole = Snapshot(
            roster=self.roster,
            slots=everyone,
            undone_tokens=undone,
            rate=self._rate,
            in_flight=load,
            waiting=waiting,
            kv_usage=kv_usage,
            most_waiting=self._most[0],
            most_kv_usage=self._most[1],
            has_adapter=has_adapter,
            free_slot=free_slot,
        )
        return whole if slots is everyone else whole.narrowed(np.array(slots, dtype=np.int64))

    def least_wait_s(self, slots: Sequence[int], *, now: float) -> float:
        """Return the least B/V of some slots."""
        idle_at = self._undone_tokens / self._rate + self._undone_at
        idle_at = idle_at if slots is self.roster.everyone else idle_at[list(slots)]
        return max(0.0, float(idle_at[idle_at.argmin()]) - now)  # `argmin` takes a third of the time of `min`

    def noes(self, snapshot: Snapshot, *, now: float) -> dict[str, Any]:
        """Return the columns of the snapshot in which requests that ended without a token count."""
        at = snapshot.at
        if len(snapshot) == 1:
            return {}
        return {
            "in_flight": _with(snapshot.in_flight, self._noes[at], more=1.0),
            "undone_tokens": _with(snapshot.undone_tokens, self._no_tokens[at]),
            "no_token": now - self._no_token_at[at] < LATELY_S,
        }


def _with(load: Floats, added: Floats, *, more: float = 0.0) -> Floats:
    """Return the load with what is added, but no more than `more` over the average of the others. So a bad
    request takes no more of a server than a good one would have taken. What is added to the others does not
    count there: a server's warm prompts stay where no server has work.
    """
    of_others = (load.sum() - load) / (len(load) - 1)
    counted: Floats = np.maximum(load, np.minimum(load + added, of_others + more))
    return counted


# -- the fleet -----------------------------------------------------------------------------------------------


class Fleet:
    """The states of all endpoints, by name, and in the order of their slots. `FleetNews` says which endpoints
    there are. Their names and addresses are unique.
    """

    def __init__(self, spec: PolicySpec, *, refuses_unknown_models: bool = True) -> None:
        """Start without endpoints. refuses_unknown_models: see `ServedModels`."""
        self._spec = spec
        self.served = ServedModels(refuses_unknown=refuses_unknown_models)
        self.answers = Answers()
        """What the servers answered, as the picker reports it."""
        self.failures = FailingServers(spec.failures, self.answers)
        """The servers that fail. The picker reports answers here, and people see the result."""
        self.unreported = Unreported()
        """The picks of other pickers that are not known here yet, as the listener's reports suggest."""
        self._model_rates: dict[str, ModelRate] = {}
        self.follow([])

    def apply(self, spec: PolicySpec) -> None:
        """Use another policy from now on."""
        self._spec, self.failures.settings = spec, spec.failures

    def follow(self, states: Sequence[EndpointState]) -> None:
        """Have these endpoints from now on. Call this after each change of the endpoints or their models."""
        self._in_slots = states
        self._by_name = {state.endpoint.name: state for state in states}
        self._by_address = {state.endpoint.address: state for state in states}
        self._columns = Columns(states)
        self.prefilling = [slot for slot, state in enumerate(states) if state.endpoint.role.prefills]
        """Slots of endpoints that compute prompts for others. Callers only read them, and `models`."""
        self.models: AbstractSet[str] = {state.model for state in states}
        """The known base models of the servers."""
        forget_models(self._model_rates, self.models)
        forget_models(self.unreported.of_models, self.models)
        self.follow_lists()

    def follow_lists(self) -> None:
        """Take in that a server's list of models is another one now, with the same base model."""
        self.served.follow(self._in_slots, self._columns.roster, self._columns.holders)

    def new_state(self, endpoint: Endpoint) -> EndpointState:
        """Return a new state. Only the prefill rate is known: the rate of the model's other servers."""
        return EndpointState(endpoint, self._rate(endpoint.model))

    def change_model(self, state: EndpointState) -> None:
        """Take in that the server's base model is another one now. Call `follow` next."""
        state.rate.model.leave(state.rate)
        state.rate = self._rate(state.model)

    def _rate(self, model: str) -> PrefillRate:
        if model not in self._model_rates:
            self._model_rates[model] = ModelRate(start=self._spec.cost.prefill_tokens_per_second)
        return PrefillRate(self._model_rates[model])

    def states(self) -> Sequence[EndpointState]:
        """Return the states of all endpoints, by slot."""
        return self._in_slots

    def in_use(self, name: EndpointName) -> bool:
        """Return whether a request was sent to the endpoint that the endpoint's last page may not show."""
        state = self.get(name)
        return state is not None and state.loads[1] + state.picks_since_scrape > 0

    # -- for picks -------------------------------------------------------------------------------------------

    def get(self, name: EndpointName) -> EndpointState | None:
        return self._by_name.get(name)

    def at(self, address: Address) -> EndpointState | None:
        return self._by_address.get(address)

    @property
    def columns(self) -> Columns:
        """The current state of every endpoint, by slot. Callers only read it."""
        columns = self._columns
        if columns.changed:
            columns.follow()
        return columns

    def candidates(self, model: str, *, subset: AbstractSet[Address] | None) -> tuple[Sequence[int], str]:
        """Return the slots of the endpoints that may serve a request for `model`, at the addresses in
        `subset` if there is one. And `model` again if it is an adapter, else an empty text.

        Raises NotReadyError if there are none, NoEndpointError if there are none in the subset, and
        UnknownModelError if no server has such a model.
        """
        answering, adapter = self.served.answering(model)
        slots = self.healthy(answering)
        if not slots:
            raise NotReadyError
        if subset is None:
            return slots, adapter
        allowed = self._within(slots, subset)
        if not allowed:
            # The subset has no server that lists the model, but one that lists nothing may have it.
            within = self._within(self._columns.roster.everyone, subset)
            allowed = list(self.healthy(self.served.within(model, within)))
        if not allowed:
            raise NoEndpointError(
                "none of the endpoints that the data plane allows is ready", reason="subset_empty"
            )
        return allowed, adapter

    def prefillers(self, model: str, *, subset: AbstractSet[Address] | None) -> Sequence[int]:
        """Return the slots of endpoints that may compute a prompt for `model` for another endpoint. May be
        empty.
        """
        able = set(self.served.slots(model))
        slots = list(self.healthy([slot for slot in self.prefilling if slot in able]))
        return slots if subset is None else self._within(slots, subset)

    def _within(self, slots: Sequence[int], subset: AbstractSet[Address]) -> list[int]:
        addresses = self._columns.roster.addresses
        return [slot for slot in slots if addresses[slot] in subset]

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
        columns, states, times = self.columns, self._in_slots, self._spec.scrape.failures_to_eject
        if not (columns.failed or columns.asleep):
            return slots
        for new in (1, times):
            down = {s for s in columns.failed if states[s].failures >= (times if states[s].metrics else new)}
            if len(down) == len(states):
                return slots
            out = down | columns.asleep
            if left := [slot for slot in slots if slot not in out] if out else slots:
                return left
        return ()

    def ready(self) -> set[EndpointState]:
        """Return all endpoints that may be picked, whatever models they serve."""
        everyone = self._columns.roster.everyone
        return {self._in_slots[slot] for slot in self.healthy(everyone)}
