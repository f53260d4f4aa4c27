"""Knows which servers can serve which model: from the models that the source declares, and from the list of
each server at `/v1/models`. Names on its metrics page stand for the list of a server that does not give it.

Only this module says which servers may get a request for a model that no list names: servers whose list is
not known yet, since they may have the model. A model can be unknown only when every list is known.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from itertools import chain
from math import inf
from typing import Any, Final, NamedTuple

import msgspec

from epp.base.errors import NotReadyError, UnknownModelError
from epp.base.types import Address, Endpoint, EndpointMetrics, ModelCard, ModelList
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.scheduling.snapshot import MOST_KEPT, Roster

_AWAY_S: Final = 300.0
"""How long a missing model counts as away if other servers of its pool are still there."""


def of_page(metrics: EndpointMetrics | None) -> ModelList | None:
    """Return the models that a metrics page names. None: it names none."""
    names = sorted(metrics.models) if metrics is not None else ()
    return ModelList(tuple(ModelCard(name) for name in names), whole=False) if names else None


class AwayModels:
    """Models whose servers have left pools that still exist, as in a rollout or when a pool is scaled to
    zero.

    A request for such a model is an error of the servers, not of the client. For a pool without servers this
    holds as long as the pool exists. For a pool with other servers it holds for `_AWAY_S`, since these may
    serve another model now.
    """

    def __init__(self) -> None:
        self._left: dict[str, dict[str, float]] = {}
        """When the model's last server left, by pool and model, the oldest first."""

    def pools(self, model: str) -> AbstractSet[str]:
        return {pool for pool, models in self._left.items() if model in models}

    def leave(self, endpoint: Endpoint, listed: ModelList | None, *, now: float) -> None:
        models = self._left.setdefault(endpoint.pool, {})
        for model in endpoint.adapters | {endpoint.model} | (listed.names if listed else frozenset()):
            if model:
                models.pop(model, None)
                models[model] = now
        while len(models) > MOST_KEPT:
            del models[next(iter(models))]

    def keep(self, pools: AbstractSet[str]) -> None:
        """Forget the models of pools that no longer exist. pools: those that exist."""
        self._left = {pool: models for pool, models in self._left.items() if pool in pools}

    def give_up(self, pools: AbstractSet[str], *, now: float) -> None:
        """Forget models whose last server left too long ago. pools: the pools that have servers."""
        for pool in self._left.keys() & pools:
            models = self._left[pool]
            self._left[pool] = {model: at for model, at in models.items() if now - at < _AWAY_S}


class ModelServers(NamedTuple):
    """The facts about one name of a model, by the lists. The empty name stands for every model."""

    slots: Sequence[int] | None
    """The servers that declare or list the name, and servers that may have the model. None: no server
    declares or lists the name.
    """
    declared: bool
    """Whether the model is an adapter that a source or a server's list names."""


class ServedModels:
    """Says which servers may get a request for which model, and which models clients see. If some server
    lists or declares a model, only such servers get requests for it.

    The servers of a model are looked up when the model is first asked for. A complete index over 100 servers
    with 512 names each would hold the loop for 150 ms whenever one of them changes its list.
    """

    def __init__(self, *, refuses_unknown: bool) -> None:
        """refuses_unknown: once every server's list is known, a request for a model in none of the lists is
        the client's error.
        """
        self._refuses = refuses_unknown
        self.unknown_asked = 0
        """Number of requests for a model that no list names. A server may have loaded the model since its
        last list."""
        self.away = AwayModels()
        self.model_list = lru_cache(maxsize=16)(self._model_list)
        """Kept until the lists change, because clients may ask for it as often as they like."""
        self._named_as = lru_cache(maxsize=MOST_KEPT)(self._look_up)
        """The picker bounds the length of names where they come in."""
        self._aliases: Mapping[str, frozenset[str]] = {}

    def follow(
        self, states: Sequence[EndpointState], roster: Roster, holders: Callable[[str], AbstractSet[int]]
    ) -> None:
        """Know these servers from now on, in the order of their slots. Call this before anything else, and
        after each change of the endpoints or their lists. holders: returns the slots of the servers that
        hold an adapter, as far as we know.
        """
        self._states, self._models, self._everyone = states, roster.models, roster.everyone
        self._holders = holders
        self.model_list.cache_clear()
        self._named_as.cache_clear()
        self._names = [state.listed.names if state.listed is not None else frozenset() for state in states]
        self.unlisted = [s for s, one in enumerate(states) if one.listed is None or not one.listed.whole]
        """Servers that have not listed their models yet."""
        heard_of = {state.endpoint.pool for state, names in zip(states, self._names, strict=True) if names}
        self._wholly_silent = [slot for slot in self.unlisted if states[slot].endpoint.pool not in heard_of]
        """Servers of pools in which no server's models are known."""
        lengths = [state.max_model_len or inf for state in states]
        self._lengths = lengths if len(set(lengths)) > 1 else None
        """The most tokens that each server takes, by slot. None: all take the same, as far as known."""
        self._no_answers = frozenset(s for s, one in enumerate(states) if not one.endpoint.role.answers)
        declared = [(state.endpoint.adapters | {state.endpoint.model}) - {""} for state in states]
        models_of = [
            names if own <= names else own | names for own, names in zip(declared, self._names, strict=True)
        ]
        self.one_model = all(models == models_of[0] for models in models_of)
        """Whether every endpoint serves the same models, as far as known."""

    def _look_up(self, model: str) -> ModelServers:
        """Return what the lists say about the name."""
        if not model:
            return ModelServers(self._everyone, declared=False)
        endpoints = [state.endpoint for state in self._states]
        slots = {slot for slot, one in enumerate(endpoints) if model == one.model or model in one.adapters}
        listing = {slot for slot, names in enumerate(self._names) if model in names}
        if listing and not slots and listing.issubset(self.unlisted):
            # Nobody gives a list, and pages come one by one: a server without a page may have the model.
            slots = {s for s, one in enumerate(self._states) if one.listed is None and not endpoints[s].model}
        slots |= listing
        declared = any(
            model in one.endpoint.adapters or (one.listed is not None and model in one.listed.adapters)
            for one in self._states
        )
        known = sorted(slots) if len(slots) < len(self._everyone) else self._everyone
        return ModelServers(known or None, declared)

    def _to_answer(self, slots: Sequence[int]) -> Sequence[int]:
        """Return those of the slots that may be a destination."""
        return [slot for slot in slots if slot not in self._no_answers] if self._no_answers else slots

    def slots(self, model: str) -> Sequence[int]:
        """Return the slots of the servers that can serve `model`, ready or not.

        An adapter that no server declares, but that a server was seen to hold, can be on any server of the
        same pool and base model: the adapter must not be tied for good to the server where it was seen.
        Raises UnknownModelError if every server says that it does not have the model, but NotReadyError if
        servers of a pool that still exists had the model.
        """
        able, holders = self._named_as(model).slots, self._holders(model)
        if able is not None:
            return able if able is self._everyone or not holders else sorted({*able, *holders})
        if holders:
            of = [(state.endpoint.pool, state.model) for state in self._states]
            known = {of[slot] for slot in holders}
            return [slot for slot in self._everyone if of[slot] in known]
        if self._everyone and not self.unlisted and self._refuses:
            self.unknown_asked += 1
            if self.away.pools(model):
                raise NotReadyError
            raise UnknownModelError(model)
        silent = self._wholly_silent or self.unlisted
        return silent if 0 < len(silent) < len(self._everyone) else self._everyone

    def pools(self, model: str) -> AbstractSet[str]:
        """Return the pools that are known to have the model, or to have had it."""
        slots = self._named_as(model).slots if model else None
        return self.away.pools(model) | {self._states[slot].endpoint.pool for slot in slots or ()}

    def answering(self, model: str) -> tuple[Sequence[int], str]:
        """Return those of the slots that may be a destination, and what `adapter` returns."""
        return self._to_answer(self.slots(model)), self.adapter(model)

    def within(self, model: str, within: Sequence[int]) -> Sequence[int]:
        """Return the slots that may have the model although their lists do not name it. within: the servers
        that the data plane allows, none of which is in `answering`. Raises UnknownModelError.
        """
        asked, able = set(within), self._named_as(model).slots or ()
        unlisted = asked.intersection(self.unlisted)
        if model and self._refuses and asked and not unlisted and asked.isdisjoint(able):
            self.unknown_asked += 1
            raise UnknownModelError(model)
        return self._to_answer(sorted(unlisted)) if asked.isdisjoint(self.slots(model)) else ()

    def adapter(self, model: str) -> str:
        """Return `model` if some endpoint declares it as an adapter or was seen to hold it, else an empty
        text.
        """
        if self._named_as(model).declared:
            return model
        holders = self._holders(model)
        if not holders:
            return ""
        return model if any(self._models[slot] != model for slot in holders) else ""

    def sharing_name(self, model: str, slot: int) -> str:
        """Return the name under which prompts for `model` share the cache of this server. A base model has
        one, whatever clients call it, and serves those who name none.
        """
        listed = self._states[slot].listed
        return listed.base if listed is not None and (not model or model in listed.bases) else model

    def fitting(self, slots: Sequence[int], *, tokens: float) -> Sequence[int]:
        """Return those of the slots that take a prompt and answer of so many tokens, by their own lists. If
        none does, all stay: one of them has to give the error.
        """
        lengths = self._lengths
        if lengths is None:
            return slots
        return [slot for slot in slots if lengths[slot] >= tokens] or slots

    def set_aliases(self, aliases: Mapping[str, frozenset[str]]) -> None:
        """Set the names that clients may use although no server lists them, each with its targets."""
        self._aliases = aliases
        self.model_list.cache_clear()

    def _model_list(self, subset: frozenset[Address] | None = None) -> bytes | None:
        """Return the answer to `GET /v1/models` in OpenAI's shape: every model of the servers once, by name.
        The first server that lists a model describes it. subset: only servers at these addresses. None: no
        server has listed its models.
        """
        lists = [
            state.listed
            for state in self._states
            if state.listed is not None
            and state.listed.whole
            and (subset is None or state.endpoint.address in subset)
        ]
        if not lists:
            return None
        cards: dict[str, ModelCard] = {}
        names = self.listed_names()
        aliases = (
            ModelCard(alias, owned_by="prefix-gateway")
            for alias, targets in self._aliases.items()
            if names is None or not names.isdisjoint(targets)  # a server may have a target
        )
        for card in chain(*(each.cards for each in lists), aliases):
            cards.setdefault(card.id, card)
        data = [cards[name] for name in sorted(cards)[:MOST_KEPT]]
        return msgspec.json.encode({"object": "list", "data": data})

    def listed_names(self) -> frozenset[str] | None:
        """Return every name that a server lists. None: not every server has given its list."""
        return frozenset().union(*self._names) if self._names and not self.unlisted else None


def forget_models(by_model: dict[str, Any], present: AbstractSet[str]) -> None:
    """Forget base models that no server has any more, once there are many. Servers choose their own names, so
    there may be any number, and each may be a time series.
    """
    gone = by_model.keys() - present
    if len(gone) > MOST_KEPT // 16:
        for model in gone:
            del by_model[model]
