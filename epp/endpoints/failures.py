"""Finds servers that fail more than the others, from their answers and from answers that never come.

A server that answers 500 at once, or hangs while its metrics look fine, always seems idle, so every rule by
load or cost would send it more requests. Each answer moves the failure share of its server, which is an
average of the last answers. This share raises the price of the server. From `shareToLeaveOut` on the server
is left out, as long as it fails more than the others and not too many servers are left out already. A server
that is left out gets a trial request now and then, and comes back with its first good answers. A 404 counts
only for its model, and only if another server has answered for this model at the same path.

Where requests are few, their answers would show too late that a server fails, or that it has recovered. So
the picker probes a server that has failed: it sends a request of one token (`probes_due`; `scraping.probes`
sends it). A probe that fails counts as a failed answer, and until a probe succeeds there are no trials but
one in `_TRIAL_PICKS` requests. A probe that succeeds proves less than a real answer: it only allows a trial.

A server hangs if its first bytes are overdue (`first_bytes`). A server whose answers begin and do not go on
is found by its own counters (`stalls`). Its answers begin all the same, so none of them brings it back, but a
probe that succeeds does, or a counter that grows. Envoy's access log tells of answers that break off midway
(`answer_cut`). They count as failures, and from then on only answers that end whole (`cuts`) count as good,
or a probe after probes that failed.

Pure: times are monotonic seconds. Owned by `Fleet`. The picker reports its own answers here, and `sharing`
reports those of other pickers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Literal

import numpy as np
from msgspec.structs import replace

from epp.config.routing import Failures as Settings
from epp.endpoints.cuts import Cuts
from epp.endpoints.first_bytes import FirstBytes, Wait
from epp.endpoints.stalls import Stalls
from epp.endpoints.state import EndpointState
from epp.scheduling.snapshot import Snapshot
from epp.types import EndpointMetrics

_STEP: Final = 0.2
"""How far one answer moves the share: four failures in a row take a server from 0 over a half."""
_TRIAL_STEP: Final = 0.4
"""How far a good answer moves the share of a server that is left out: two bring it back under a half."""
_HALF_LIFE_S: Final = 5.0
"""Half-life of the share of a server that is not left out."""
_NOTHING: Final = 0.06
"""A smaller share is forgotten: 9 s after a single failure. On an idle fleet servers differ by less than even
a small share costs, so a server that is well again would wait for its next request until then.
"""
_ABOVE_MEAN: Final = 0.2
"""A server is left out only if its share is this much over the average of the candidates."""
_TRIAL_PICKS: Final = 64
"""Requests from one trial to the next, unless `_LONGEST_TRIALS` trial intervals have passed."""
_LONGEST_TRIALS: Final = 4.0
_SUSPECT_PROBES_S: Final = 0.5
"""Time between two probes of a server that has failed and is not left out."""
_MOST_PROBES: Final = 32
"""The most probes that one picker has open at a time."""
_QUEUE_S: Final = 0.5
"""Time that a server needs for its undone prompt tokens, above which a probe may have to wait for it."""
_SERVED_MODELS: Final = 256
_MOST_MARKS: Final = 4096


Verdict = Literal["well", "ill", "unclear"]
"""The result of a probe. unclear: the server does not accept such requests, or no connection was possible."""


@dataclass(slots=True, eq=False)
class Probe:
    """A request of one token that the picker should send."""

    state: EndpointState
    model: str
    """The model that the probe asks for. Never empty."""
    about: str
    """The model that failed, if only one model fails. Empty: the server fails at all models."""
    mark: Mark
    """What the picker knows of the server when it sends the probe."""
    queued: bool = False
    """Whether other requests wait at the server, so that a late answer proves nothing."""


@dataclass(slots=True, eq=False)
class Mark:
    """How often one server fails, at all models or at one model."""

    share: float = 0.0
    at: float = 0.0
    """When the share was true; it halves every `_HALF_LIFE_S` from then on, unless the server is left out."""
    out: bool = False
    """Whether the share was over the limit and has not come back under it."""
    hangs: bool = False
    stalls: bool = False
    """Whether the server hangs although its answers begin. Such beginnings prove nothing."""
    tried_at: float = 0.0
    """When the last trial was sent, or when the server was first left out."""
    tried_picks: int = 0
    may_stall: bool = False
    """Whether the counters say that the server hangs while no other server is busy. The next probe
    decides."""
    asked_model: str = ""
    """The model that the last failed request asked for. Empty: not known."""
    verdict: Verdict | None = None
    """Result of the last probe. None: there was no probe since the last failure, or since the server was left
    out."""
    probed_at: float = -inf
    probing: bool = False

    def now(self, now: float) -> float:
        return self.share if self.out else self.share * 0.5 ** (max(0.0, now - self.at) / _HALF_LIFE_S)


class Failures:
    def __init__(self) -> None:
        self._marks: OrderedDict[tuple[EndpointState, str], Mark] = OrderedDict()
        """By server and model; the model is empty except for a 404. Only servers that have failed lately are
        here."""
        self._served: OrderedDict[tuple[str, int], EndpointState] = OrderedDict()
        """The last server that answered for each model and path that was asked for lately."""
        self._picks = 0
        self._first_bytes = FirstBytes()
        self._stalls = Stalls()
        self._cuts = Cuts()

    @property
    def remembered(self) -> int:
        """Requests whose first byte may become overdue."""
        return len(self._first_bytes)

    # -- what happens ----------------------------------------------------------------------------------------

    def sent(
        self, state: EndpointState, *, streams: bool, foretold_s: float, settings: Settings, now: float
    ) -> Wait:
        """A request was sent to a server that is predicted to need `foretold_s` to its first token."""
        self._picks += 1
        return self._first_bytes.sent(
            state, streams=streams, foretold_s=foretold_s, hang_seconds=settings.hang_seconds, now=now
        )

    def began(self, wait: Wait, *, now: float) -> None:
        """Record that the first byte of an answer came."""
        self._first_bytes.began(wait, now=now)

    def answered(
        self,
        state: EndpointState,
        *,
        failed: bool,
        model: str = "",
        asked_model: str = "",
        whole: bool = False,
        settings: Settings,
        now: float,
    ) -> None:
        """A server answered, well or with a failure.

        model: only this model fails. asked_model: the model that the request asked for, if known. whole: the
        answer is known to be complete.
        """
        if state.gone:
            return
        mark = self._marks.get((state, model))
        if not failed and ((mark is not None and mark.stalls) or (state in self._cuts and not whole)):
            return
        if mark is None:
            if not failed:
                return
            mark = self._marks[state, model] = Mark()
            while len(self._marks) > _MOST_MARKS:
                self._marks.popitem(last=False)
        step = _TRIAL_STEP if mark.out and not failed else _STEP
        share = mark.now(now)
        mark.share, mark.at = share + step * (float(failed) - share), now
        if failed and not mark.out:
            mark.asked_model, mark.verdict = asked_model or mark.asked_model, None
        if failed and mark.share >= settings.share_to_leave_out and not mark.out:
            self._leave_out(mark, now=now)
        elif not failed and mark.out:
            if mark.share < settings.share_to_leave_out:
                _recovered(mark, now=now)  # the trials succeeded
            _allow_trial(mark, settings=settings, now=now)  # with the next request

    def answer_cut(self, state: EndpointState, *, settings: Settings, now: float) -> None:
        """An answer that began well broke off midway; this picker or another one was told so."""
        if not state.gone:
            self._cuts.cut(state)
            self.answered(state, failed=True, settings=settings, now=now)

    def ended(self, state: EndpointState, *, now: float) -> None:
        """An answer that began well has ended, by its end or by a cut."""
        self._cuts.ended(state, now=now)

    def refused_model(
        self, state: EndpointState, model: str, *, place: int, settings: Settings, now: float
    ) -> None:
        """A server answered 404. It counts where another server has answered for this model at the same path:
        clients also name paths that no server has.
        """
        if self._served.get((model, place), state) is not state:
            self.answered(state, failed=True, model=model, settings=settings, now=now)

    def served_model(
        self, state: EndpointState, model: str, *, place: int, settings: Settings, now: float
    ) -> None:
        """A server answered well for a model, at this path."""
        self._served[model, place] = state
        state.answered_model = model
        self._served.move_to_end((model, place))
        while len(self._served) > _SERVED_MODELS:
            self._served.popitem(last=False)
        if self._marks:
            self.answered(state, failed=False, settings=settings, now=now)
            self.answered(state, failed=False, model=model, settings=settings, now=now)

    def forget(self, state: EndpointState) -> None:
        """Forget all marks of a server that has left, or whose name another process has now."""
        for key in [key for key in self._marks if key[0] is state]:
            del self._marks[key]
        self._cuts.forget(state)
        self._first_bytes.forget(state)
        self._stalls.forget(state)

    def tried(self, state: EndpointState, model: str, *, now: float) -> None:
        """Record that a trial request was sent to the server."""
        for key in ((state, ""), (state, model)):
            mark = self._marks.get(key)
            if mark is not None:
                mark.tried_at, mark.tried_picks = now, self._picks

    def look(self, *, settings: Settings, now: float) -> Sequence[EndpointState]:
        """Find requests whose first byte is overdue, and forget shares that have become very small. Returns
        the servers that hang from now on.
        """
        for state in self._cuts.whole(now=now):
            self.answered(state, failed=False, whole=True, settings=settings, now=now)
        found = [state for state in self._first_bytes.suspects(now=now) if self.hangs(state, now=now)]
        if self._marks:
            for key in [
                key for key, mark in self._marks.items() if not mark.out and mark.now(now) < _NOTHING
            ]:
                del self._marks[key]
                if not key[1]:
                    self._cuts.forget(key[0])
        return found

    def page(
        self,
        state: EndpointState,
        before: EndpointMetrics | None,
        after: EndpointMetrics,
        *,
        settings: Settings,
        now: float,
    ) -> bool:
        """Take in a metrics page. True: it shows that the server hangs, and this was not known before."""
        seen = self._stalls.page(state, before, after, hang_seconds=settings.hang_seconds, now=now)
        mark = self._marks.get((state, ""))
        if seen == "grew" and mark is not None:
            mark.may_stall = False
            if mark.stalls:
                _recovered(mark, now=now)
        elif seen == "stalls alone":
            news = self.hangs(state, now=now)
            self._marks[state, ""].stalls = True
            return news
        elif seen == "stalls" and (mark is None or not (mark.may_stall or mark.stalls)):
            self.answered(state, failed=True, settings=settings, now=now)
            self._marks[state, ""].may_stall = True
        return False

    def hangs(self, state: EndpointState, *, now: float) -> bool:
        """A server hangs, as this picker or another one found. True: this was not known before."""
        if state.gone:
            return False
        mark = self._marks.setdefault((state, ""), Mark())
        news = not mark.hangs
        mark.share, mark.at, mark.hangs = 1.0, now, True
        if not mark.out:
            self._leave_out(mark, now=now)
        return news

    def _leave_out(self, mark: Mark, *, now: float) -> None:
        mark.out, mark.verdict = True, None
        mark.tried_at, mark.tried_picks = now, self._picks

    # -- probes ----------------------------------------------------------------------------------------------

    def probes_due(self, *, settings: Settings, now: float) -> Sequence[Probe]:
        """The probes to send now. Report the result of each to `probed`. A server that has failed is probed
        until a probe succeeds or is unclear; a server that is left out, until it is back.
        """
        if not self._marks or not settings.probe:
            return ()
        free = _MOST_PROBES - sum(mark.probing for mark in self._marks.values())
        due: list[tuple[float, int, EndpointState, str, Mark]] = []
        for (state, about), mark in self._marks.items():
            every_s = settings.trial_seconds if mark.out else min(_SUSPECT_PROBES_S, settings.trial_seconds)
            done = not mark.out and mark.verdict in ("well", "unclear")
            if not (mark.probing or done) and now - mark.probed_at >= every_s and _takes_probes(state):
                due.append((mark.probed_at, len(due), state, about, mark))
        probes = []
        for _, _, state, about, mark in sorted(due)[: max(0, free)]:
            if model := about or mark.asked_model or state.answered_model or state.model:
                mark.probing, mark.probed_at = True, now
                # A queue explains nothing if the counters stand still for longer than the queue should take.
                queued = not (mark.stalls or mark.may_stall) and _has_queue(state, now=now)
                probes.append(Probe(state, model, about, mark, queued=queued))
        return probes

    def probed(self, probe: Probe, verdict: Verdict, *, settings: Settings, now: float) -> None:
        mark = self._marks.get((probe.state, probe.about))
        if mark is not probe.mark:
            return  # The probe was sent for an earlier mark.
        mark.probing = False
        if verdict == "ill" and mark.may_stall:
            self.hangs(probe.state, now=now)
            mark.may_stall, mark.stalls = False, True
        elif verdict == "ill" and not mark.out:
            self.answered(probe.state, failed=True, model=probe.about, settings=settings, now=now)
        elif verdict == "well" and (mark.stalls or (mark.verdict == "ill" and probe.state in self._cuts)):
            _recovered(mark, now=now)
        elif verdict == "well" and mark.out and mark.verdict != "well":
            _allow_trial(mark, settings=settings, now=now)
        mark.verdict = verdict

    # -- what a pick and people are told ---------------------------------------------------------------------

    def onto(self, snapshot: Snapshot, *, model: str, settings: Settings, now: float) -> Snapshot:
        """The snapshot with the candidates' failures for a request for `model` filled in."""
        if not self._marks:
            return snapshot
        places = snapshot.places_by_slot()
        shares = np.zeros(len(snapshot))
        marks: dict[int, Mark] = {}
        for (state, about), mark in self._marks.items():
            place = places.get(state.slot) if about in ("", model) else None
            if place is not None and mark.now(now) > shares[place]:
                shares[place], marks[place] = mark.now(now), mark
        if not marks:
            return snapshot
        out = self._left_out(shares, marks, settings)
        mask = np.zeros(len(snapshot), dtype=np.bool_)
        mask[out] = True
        # Servers that are not left out only because others fail more need trials too. Otherwise their shares
        # would never fall.
        trials = [p for p, m in marks.items() if m.out and self._trial_is_due(m, settings=settings, now=now)]
        if not settings.max_left_out_share:
            trials = []
        trials.sort(key=lambda place: marks[place].tried_at)
        return replace(snapshot, failure_share=shares, failing=mask if out else None, trials=trials)

    def _left_out(
        self, shares: np.typing.NDArray[np.float64], marks: dict[int, Mark], settings: Settings
    ) -> list[int]:
        most = int(settings.max_left_out_share * len(shares))
        least = shares.mean() + _ABOVE_MEAN
        out = [place for place, mark in marks.items() if mark.out and shares[place] >= least]
        return sorted(out, key=lambda place: -shares[place])[:most]

    def _trial_is_due(self, mark: Mark, *, settings: Settings, now: float) -> bool:
        waited = now - mark.tried_at
        if mark.stalls and mark.verdict == "ill" and settings.probe:
            return False  # a trial would prove nothing
        if waited >= settings.trial_seconds and self._picks - mark.tried_picks >= _TRIAL_PICKS:
            return True
        return mark.verdict != "ill" and waited >= _LONGEST_TRIALS * settings.trial_seconds

    @property
    def known(self) -> bool:
        return bool(self._marks)

    def share(self, state: EndpointState, *, now: float) -> float:
        """The share of a server's last answers that failed. Old answers count less."""
        mark = self._marks.get((state, ""))
        return mark.now(now) if mark is not None else 0.0

    def why(
        self, states: Sequence[EndpointState], *, settings: Settings, now: float
    ) -> dict[EndpointState, str]:
        """Servers that are left out for all models, and the reasons."""
        marks = {n: m for n, s in enumerate(states) if (m := self._marks.get((s, ""))) is not None}
        if not marks:
            return {}
        shares = np.zeros(len(states))
        for n, mark in marks.items():
            shares[n] = mark.now(now)
        out = self._left_out(shares, marks, settings)
        return {states[n]: self._reason(states[n], marks[n]) for n in out}

    @property
    def lacking(self) -> Sequence[tuple[EndpointState, str]]:
        """Servers and the models that they lack: each gets only trial requests for its model."""
        return [key for key, mark in self._marks.items() if key[1] and mark.out]

    def _reason(self, state: EndpointState, mark: Mark) -> str:
        if mark.hangs:
            return "its requests hang"
        return "its answers break off midway" if state in self._cuts else "its answers fail"

    def check_integrity(self) -> None:
        assert len(self._marks) <= _MOST_MARKS
        assert all(0.0 <= mark.share <= 1.0 for mark in self._marks.values())
        assert len(self._served) <= _SERVED_MODELS
        self._first_bytes.check_integrity()
        self._cuts.check_integrity()


def _recovered(mark: Mark, *, now: float) -> None:
    """The mark of a server that has recovered. It is the same as after one failure."""
    mark.out = mark.hangs = mark.stalls = False
    mark.share, mark.at = min(mark.share, _STEP), now


def _allow_trial(mark: Mark, *, settings: Settings, now: float) -> None:
    mark.tried_at = now - _LONGEST_TRIALS * settings.trial_seconds


def _takes_probes(state: EndpointState) -> bool:
    """Whether the endpoint answers clients itself. Ranks of a server share one address."""
    return state.endpoint.role.answers and state.endpoint.rank is None


def _has_queue(state: EndpointState, *, now: float) -> bool:
    """Whether the server has a queue, by its page or by the tokens that it still has to compute."""
    rate = state.rate.tokens_per_s
    waiting = state.metrics.waiting if state.metrics is not None else None
    return bool(waiting) or state.backlog.undone_tokens(now=now, rate=rate) > rate * _QUEUE_S
