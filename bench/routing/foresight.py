"""What the picker would do with a request, without doing it: its own table, loads and rule, asked by the simulator's flow control."""

from __future__ import annotations

from dataclasses import dataclass

from epp.cache_beliefs import Prompt
from epp.decision import PickRequest
from epp.flow.request import Forecast
from epp.picker import Picker
from epp.scheduling.schedule import Request
from epp.scheduling.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A request and its prompt, hashed once however often it is asked about."""

    request: PickRequest
    prompt: Prompt


class Foresight:
    def __init__(self, picker: Picker) -> None:
        self._picker = picker

    def see(self, request: PickRequest) -> Foreseen:
        picker = self._picker
        model = next(iter(picker.endpoints())).model
        prompt = picker._mirrors.prompt(request.inference, base_model=model, body_bytes=request.body_bytes)
        return Foreseen(request, prompt)

    def least_wait_s(self, *, now: float) -> float:
        snapshot = self._snapshot("", now=now)
        return float((snapshot.undone_tokens / snapshot.rate).min())

    def forecast(self, foreseen: Foreseen, *, now: float) -> Forecast:
        picker, prompt = self._picker, foreseen.prompt
        snapshot = self._snapshot(foreseen.request.inference.model, now=now)
        cached = picker._mirrors.cached_tokens(prompt, picker.fleet.columns.block_tokens)
        asked = Request(prompt.tokens, snapshot.of(cached), foreseen.request.session)
        choice = picker._scheduler.schedule(asked, snapshot)
        place = choice.places[0]
        wait_s = snapshot.undone_tokens / snapshot.rate
        own_s = choice.uncached_tokens / snapshot.rate
        return Forecast(
            wait_s=float(wait_s[place]),
            soonest_s=float((wait_s + own_s).min()),
            own_s=float(own_s[place]),
            tokens=int(choice.uncached_tokens[place]),
        )

    def _snapshot(self, model: str, *, now: float) -> Snapshot:
        fleet, spec = self._picker.fleet, self._picker.policy.spec
        slots = fleet.candidates(model, subset=None, failures_to_eject=spec.scrape.failures_to_eject)
        return fleet.snapshot(
            slots, model=model, adapter=fleet.adapter(model) if model else "", spec=spec, now=now
        )
