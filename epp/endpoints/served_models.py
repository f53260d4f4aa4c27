"""Which servers can serve which model: what the source declares, and what each server lists at `/v1/models`.

`ModelList` is what one server lists. `Serving` is an index over one list of endpoints; it never changes, and
`Fleet` makes another one when endpoints come or go, or when a server lists other models. The one place that
says who is asked for a model that nobody declares: servers whose list is not known yet, since they may have
it. Only when every list is known can a model be unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from epp.errors import UnknownModelError
from epp.types import Endpoint

MOST_LISTED: Final = 4096
"""Models in the gateway's answer to `GET /v1/models`; more are left out."""
_AWAY_S: Final = 300.0
"""How long a model is waited for whose servers have left a pool that has others."""
_MOST_GONE: Final = 256
T = TypeVar("T")


class ModelCard(Struct, frozen=True, gc=False):
    """One model or adapter that a server lists. Fields as OpenAI and vLLM have them."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = ""
    root: str | None = None
    parent: str | None = None
    """The base model of an adapter; None: it is a base model itself."""
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class ModelList:
    """What one server lists; never empty."""

    cards: tuple[ModelCard, ...]

    @property
    def base(self) -> str:
        """The name of its base model; a server may have several names for it, and the first counts."""
        return next((card.id for card in self.cards if card.parent is None), self.cards[0].id)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(card.id for card in self.cards)

    @property
    def adapters(self) -> frozenset[str]:
        return frozenset(card.id for card in self.cards if card.parent is not None)


def union(lists: Iterable[ModelList], *, more: Iterable[ModelCard] = ()) -> bytes:
    """The answer to `GET /v1/models` in OpenAI's shape:
    every model once, as the first server of it says, by name.

    more: models that no server lists. They give way to those that one does.
    """
    cards: dict[str, ModelCard] = {}
    for one in lists:
        for card in one.cards:
            cards.setdefault(card.id, card)
    for card in more:
        cards.setdefault(card.id, card)
    data = [cards[name] for name in sorted(cards)[:MOST_LISTED]]
    return msgspec.json.encode({"object": "list", "data": data})


class AwayModels:
    """Models whose servers have left pools that still exist,
    as in a rollout or when a pool is scaled to none.

    A request for such a model is an error of the servers, not of the client. A pool that has no server is
    waited for as long as it exists, one that has others for `_AWAY_S`: they may serve something else in place
    of it.
    """

    def __init__(self) -> None:
        self._left: dict[str, dict[str, float]] = {}
        """By pool and model, when its server left; the oldest first."""

    def __contains__(self, model: str) -> bool:
        return any(model in models for models in self._left.values())

    def leave(self, endpoint: Endpoint, listed: ModelList | None, *, now: float) -> None:
        """One of its servers has left."""
        models = self._left.setdefault(endpoint.pool, {})
        for model in endpoint.adapters | {endpoint.model} | (listed.names if listed else frozenset()):
            if model:
                models.pop(model, None)
                models[model] = now
        while len(models) > MOST_LISTED:
            del models[next(iter(models))]

    def keep(self, pools: AbstractSet[str]) -> None:
        """Forget what left other pools than these, which exist."""
        self._left = {pool: models for pool, models in self._left.items() if pool in pools}

    def give_up(self, pools: AbstractSet[str], *, now: float) -> None:
        """Forget what left too long ago. pools: those that have servers."""
        for pool in self._left.keys() & pools:
            models = self._left[pool]
            self._left[pool] = {model: at for model, at in models.items() if now - at < _AWAY_S}

    def check_integrity(self) -> None:
        assert all(len(models) <= MOST_LISTED for models in self._left.values())
        assert all([*models.values()] == sorted(models.values()) for models in self._left.values())


class Serving:
    """`listed`: by slot, what each server lists; None: not known.

    A server whose list is not known may have what others list, but only what others of its own pool list, and
    nothing of that until it has been asked once: the answer comes within a second, and a wrong guess is a
    404.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        listed: Sequence[ModelList | None],
        *,
        everyone: range,
        unasked: AbstractSet[int] = frozenset(),
    ) -> None:
        """everyone: all slots; returned as that very object where everyone serves a model.
        unasked: slots of new servers.
        """
        self._everyone = everyone
        self._pools = [endpoint.pool for endpoint in endpoints]
        self._declared: set[str] = set()
        """Adapters that a source or a server's list names."""
        self.unlisted: Sequence[int] = [slot for slot, one in enumerate(listed) if one is None]
        able: dict[str, set[int]] = {}
        said: set[str] = set()
        for slot, endpoint in enumerate(endpoints):
            self._declared |= endpoint.adapters
            for model in endpoint.adapters | {endpoint.model}:
                able.setdefault(model, set()).add(slot)
                said.add(model)
        heard_of: set[str] = set()
        """Pools of which some server's list is known."""
        for slot, one in enumerate(listed):
            if one is not None:
                self._declared |= one.adapters
                heard_of.add(self._pools[slot])
                for model in one.names:
                    able.setdefault(model, set()).add(slot)
        # What the source declares is meant to be all, so that only servers without it may have more.
        silent: dict[str, set[int]] = {}
        for slot in self.unlisted:
            if not endpoints[slot].model and slot not in unasked:
                silent.setdefault(self._pools[slot], set()).add(slot)
        for model in able.keys() - said if silent else ():
            for pool in {self._pools[slot] for slot in able[model]}:
                able[model] |= silent.get(pool, set())
        self._wholly_silent = [slot for slot in self.unlisted if self._pools[slot] not in heard_of]
        """Servers of pools of which nobody has said anything."""
        self._able: dict[str, Sequence[int]] = {
            model: everyone if len(slots) == len(endpoints) else sorted(slots)
            for model, slots in able.items()
        }
        self.one_model = all(
            slots is everyone for model, slots in self._able.items() if model or not any(listed)
        )
        """Every endpoint serves the same models, as far as anybody says."""

    def declares(self, adapter: str) -> bool:
        """Whether a source or a server's list names an adapter so."""
        return adapter in self._declared

    def slots(
        self, model: str, *, holders: AbstractSet[int], bases: Sequence[str], refuses: bool
    ) -> Sequence[int]:
        """Who can serve `model`, ready or not. holders: who was seen to hold it as an adapter;
        bases: base models by slot.

        An adapter that nobody declares but a server was seen to hold can be on any server of the same pool
        and base model: having seen it once must not tie it to that server for good. UnknownModelError: no
        server has it, if `refuses` such models.
        """
        able = self._able.get(model)
        if able is not None:
            return able if able is self._everyone or not holders else sorted({*able, *holders})
        if holders:
            known = {(self._pools[slot], bases[slot]) for slot in holders}
            return [slot for slot in self._everyone if (self._pools[slot], bases[slot]) in known]
        if self._everyone and not self.unlisted and refuses:
            raise UnknownModelError(model)
        silent = self._wholly_silent or self.unlisted
        return silent if 0 < len(silent) < len(self._everyone) else self._everyone

    def none_serves(self, model: str, slots: Iterable[int]) -> bool:
        """Whether it is known of all these, of which there is at least one,
        that they do not serve `model`.
        """
        asked = set(slots)
        return bool(asked) and asked.isdisjoint(self.unlisted) and asked.isdisjoint(self._able.get(model, ()))


def forget_models(by_model: dict[str, T], present: AbstractSet[str]) -> None:
    """Forget what is kept of base models that no server has any more, once they are many:
    servers name themselves as they like.
    """
    gone = by_model.keys() - present
    if len(gone) > _MOST_GONE:
        for model in gone:
            del by_model[model]
