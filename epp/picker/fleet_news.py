"""Takes in what the sources say: endpoints, lists of models, scrapes, KV reports, failures and probes.

Owns the fleet and the prefix table, and keeps both right between requests. `picker` owns this object and
chooses endpoints by the two. Every method is synchronous and books nothing. No request runs this code. The
composition root calls it, and so does `sharing` for the events of other pickers.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from epp.base.types import Address, Endpoint, EndpointMetrics, EndpointName, ModelList
from epp.config.policy import PolicySpec
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.fleet import Fleet
from epp.picker.endpoints.learned import restarted
from epp.picker.endpoints.marks import Form, Proof
from epp.picker.endpoints.served_models import of_page
from epp.picker.events import Cut, Hangs, OnEvent, Restarted
from epp.picker.guesses import Guesses
from epp.picker.prefix_index.secret import HashSecret
from epp.picker.prefix_index.upkeep import clear_endpoint, drop_endpoint
from epp.picker.scheduling.snapshot import MOST_KEPT
from epp.picker.server_caches import ServerCaches
from epp.request.rewriting import Rewrites

_KEPT_S: Final = 60.0
"""How long an endpoint that left is remembered: longer than a readiness probe needs to decide, and shorter
than a cache needs to change its content."""


class FleetNews:
    """What the picker knows of endpoints, caches and names of models."""

    def __init__(
        self, spec: PolicySpec, send: OnEvent, *, secret: HashSecret, refuses_unknown_models: bool
    ) -> None:
        """Start without endpoints. send: sends an event to all listeners. refuses_unknown_models: once all
        lists are known, a request for a model that no server lists gets 404.
        """
        self.send = send
        self.fleet = Fleet(spec, refuses_unknown_models=refuses_unknown_models)
        """The state of every endpoint. Outside this class only `sharing` changes these states."""
        self.rewrites: Rewrites | None = None
        """Rewrites of model names. The streams apply them before a prompt is hashed. None: no rewrites."""
        self._left: dict[EndpointName, tuple[Endpoint, float]] = {}
        """Endpoints that left a moment ago, and when. They may come back unchanged: a pod that was not Ready
        for some seconds still has a warm cache. Until they are forgotten they keep their share of the table.
        This needs a source that names the process (`incarnation`): if a file lists an endpoint again, nobody
        knows whether its process was restarted meanwhile."""
        self.caches = ServerCaches(spec, secret=secret)
        self.guesses = Guesses(self.caches, send)
        """What is assumed of requests whose answers have not begun. `sharing` uses it too."""

    def set_secret(self, secret: HashSecret) -> None:
        """Use another secret for hashes from the next pick on. The table starts empty."""
        self.caches.set_secret(secret)
        self._fill_table()

    @property
    def one_model(self) -> bool:
        """Tell whether every endpoint serves the same models. A request can then be routed without knowing
        its model.
        """
        return self.fleet.served.one_model and self.rewrites is None

    def endpoints(self) -> list[Endpoint]:
        return [s.endpoint for s in self.fleet.states()]

    def set_endpoints(
        self, endpoints: Sequence[Endpoint], *, now: float, pools: AbstractSet[str] = frozenset()
    ) -> None:
        """Follow the source's list of endpoints. States of endpoints that stay are kept.
        pools: the InferencePools that exist, with or without endpoints.
        """
        fleet, wanted = self.fleet, {endpoint.name: endpoint for endpoint in endpoints}
        for gone in [state for state in fleet.states() if state.endpoint.name not in wanted]:
            self._leave(gone, now=now)
        fleet.served.away.keep(pools)
        states = [state for state in fleet.states() if not state.gone]
        for state in states:
            old, old_model = state.endpoint, state.model
            state.endpoint = wanted.pop(old.name)
            if old.process != state.endpoint.process:
                state.listed = None
                self._start_cold(state, now=now)
            if old_model != state.model:
                fleet.change_model(state)
        for endpoint in wanted.values():
            state = fleet.new_state(endpoint)
            states.append(state)
            left = self._left.pop(endpoint.name, None)
            if left is not None and left[0].process == endpoint.process:
                # The mirror keeps its size until the server states one, because a guess must not evict
                # anything.
                continue
            if left is not None:
                drop_endpoint(self.caches.table, endpoint.name)
            self.caches.add(state)
        fleet.follow(states)
        self.caches.forget_models(fleet.models)
        self.caches.align(fleet.columns.roster.names)  # the table's bits stand for other slots now

    def _leave(self, gone: EndpointState, *, now: float) -> None:
        gone.rate.model.leave(gone.rate)
        gone.gone, gone.slot = True, -1
        self.fleet.failures.forget(gone)
        self.fleet.served.away.leave(gone.endpoint, gone.listed, now=now)
        self.guesses.forget(gone)
        if gone.endpoint.incarnation and len(self._left) < MOST_KEPT:
            self._left[gone.endpoint.name] = gone.endpoint, now
        else:
            drop_endpoint(self.caches.table, gone.endpoint.name)

    def _start_cold(self, state: EndpointState, *, now: float) -> None:
        """Take in that another process, with a cold cache, serves under this name."""
        state.forget_server(now=now)
        self.fleet.failures.forget(state)
        clear_endpoint(self.caches.table, state.endpoint.name)

    def take_lists(self, lists: Mapping[EndpointName, ModelList | None], *, now: float) -> None:
        """Take in the servers' lists at `/v1/models`. None means that the server was asked, but did not list
        its models: the names on its metrics page then stand for a list that was never known. A server that
        lists another base model than before counts as another server from now on.
        """
        fleet, renamed, changed = self.fleet, False, False
        for name, given in lists.items():
            state = fleet.get(name)
            if state is None:
                continue
            state.gives_no_list = given is None
            unknown = state.listed is None or not state.listed.whole
            listed = of_page(state.metrics) if given is None and unknown else given
            if listed is not None and state.listed != listed:
                before, state.listed, changed = state.model, listed, True
                if state.model != before:
                    renamed = True
                    if before:
                        self._start_cold(state, now=now)
                    fleet.change_model(state)
            self.caches.fit(state)
        if renamed:
            fleet.follow(fleet.states())
        elif changed:
            fleet.follow_lists()
        self.caches.forget_models(fleet.models)

    def set_rewrites(self, rewrites: Rewrites) -> None:
        """Set the other names for models, from the next request on. They are listed with the servers' own
        names.
        """
        self.rewrites = rewrites or None
        self.fleet.served.set_aliases(rewrites.aliases)

    def observe(self, name: EndpointName, metrics: EndpointMetrics | None, *, now: float) -> None:
        """Take in one scrape. None means that the scrape failed."""
        state = self.fleet.get(name)
        if state is None:
            return
        before = state.metrics
        if before is not None and metrics is not None and restarted(before, metrics):
            self._start_cold(state, now=now)
            before = None
            self.send(Restarted(now, state))
        if self.fleet.failures.page(state, metrics, now=now):
            self.send(Hangs(now, state))
        if metrics is None:
            state.scrape_failed(now=now)
            self.guesses.page(state, now=now)
            return
        if metrics.asleep and not (before is not None and before.asleep):
            clear_endpoint(self.caches.table, name)  # a sleeping engine keeps no cache
        state.take_page(metrics, now=now)
        if state.listed is None and state.gives_no_list and metrics.models:
            self.take_lists({name: None}, now=now)  # the list was asked for before the first page came
        self.guesses.page(state, now=now)
        self.caches.take_page(state, before, metrics)

    def on_peer_answer(self, state: EndpointState, *, failed: bool, now: float) -> None:
        """Take in that another picker got an answer from this server, good or bad."""
        failures = self.fleet.failures
        if failed:
            failures.failed(state, Form.FAILS, now=now)
        elif failures.marks:
            failures.ended(state, now=now)
            failures.good(state, proof=Proof.BEGUN, now=now)

    def answer_cut(self, served: Address, *, now: float) -> bool:
        """Note that an answer of this endpoint began well and broke off midway. Return False if no endpoint
        has this address, or if several ranks share it: then any of them may have served the answer.
        """
        state = self.fleet.at(served)
        if state is None or state.endpoint.rank is not None:
            return False
        self.fleet.failures.failed(state, Form.CUTS, now=now)
        self.send(Cut(now, state))
        return True

    def ejected(self, *, now: float) -> Mapping[EndpointState, str]:
        """Return servers that get only trial requests, and why."""
        return self.fleet.failures.why(self.fleet.states(), now=now)

    def follow_policy(self, spec: PolicySpec) -> None:
        """Use another policy. The table is kept, unless prompts are cut differently now."""
        self.fleet.apply(spec)
        if self.caches.apply(spec):
            for state in self.fleet.states():
                self.caches.fit(state)
        else:
            self._fill_table()

    def give_up_left(self, *, now: float) -> None:
        """Forget the caches and the models of endpoints that have left and did not come back."""
        self.fleet.served.away.give_up({state.endpoint.pool for state in self.fleet.states()}, now=now)
        for name in [name for name, (_, at) in self._left.items() if now - at >= _KEPT_S]:
            del self._left[name]
            drop_endpoint(self.caches.table, name)

    def _fill_table(self) -> None:
        """Give each endpoint a mirror in the table that has just started. Endpoints that may come back have
        lost theirs.
        """
        for state in self.fleet.states():
            self.caches.add(state)
        self._left.clear()
        self.caches.align(self.fleet.columns.roster.names)
