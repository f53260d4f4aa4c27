"""Finds servers that fail more than the others, from their answers and from answers that never come.

A server that answers 500 at once, or hangs while its metrics look fine, always seems idle, so every rule by
load or cost would send it more requests. Each answer moves the failure share of its server, which is an
average of the last answers. This share raises the price of the server. From `shareToLeaveOut` on the server
is left out, as long as it fails more than the others and not too many servers are left out already. A server
that is left out gets a trial request now and then, and comes back with its first good answers. A 404 counts
only for its model, and only if another server has answered for this model at the same path.

Where requests are few, their answers would show too late that a server fails, or that it has recovered. So
the picker probes a server that has failed: it sends a request of one token (`probes_due`; `scraping.probes`
sends it). A probe that fails counts as a failed answer. Until a probe succeeds, only one of `_TRIAL_PICKS`
requests is a trial. A probe that succeeds proves less than a real answer: it only allows a trial.

A server hangs if its first bytes are overdue (`endpoint_state.Answers`), or if its answers begin and do not
go on (`symptoms`). In the second case the beginning of an answer proves nothing: only a probe that succeeds
or a counter that grows brings the server back. Envoy's access log reports answers that break off midway
(`answer_cut`). Such answers count as failures. From then on only complete answers count as good, or a probe
that succeeds after probes that failed.

Pure: times are monotonic seconds. `Fleet` owns this object. The picker reports answers that failed. While
there is a mark, it reports all of its answers, and `sharing` reports those of other pickers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace

from epp.config.routing import Failures as Settings
from epp.endpoints.endpoint_state import Answers, EndpointState, Wait, counts_answers
from epp.endpoints.marks import LONGEST_TRIALS, STEP, Mark, Probe, Verdict
from epp.endpoints.symptoms import Cuts, Stalls, suspects
from epp.scheduling.snapshot import Snapshot
from epp.types import EndpointMetrics

_TRIAL_STEP: Final = 0.4
"""How far a good answer moves the share of a server that is left out: two bring it back under a half."""
_NOTHING: Final = 0.06
"""A smaller share is forgotten, which takes 9 s after a single failure. Until then a server that is well
again gets no request on an idle fleet, because even a small share adds more to the cost than the difference
between servers.
"""
_ABOVE_MEAN: Final = 0.2
"""A server is left out only if its share is this much over the average of the candidates."""
_TRIAL_PICKS: Final = 64
"""Requests from one trial to the next, unless `LONGEST_TRIALS` trial intervals have passed."""
_SUSPECT_PROBES_S: Final = 0.5
"""Time between two probes of a server that has failed and is not left out."""
_MOST_PROBES: Final = 32
"""The largest number of probes that one picker has open at a time."""
_QUEUE_S: Final = 0.5
"""If a server needs more time than this for its undone prompt tokens, a probe may have to wait."""
_MOST_MARKS: Final = 4096


class Failures:
    """Keeps the marks of servers that fail, and says which servers are left out, tried or probed."""

    def __init__(self, settings: Settings, answers: Answers) -> None:
        self.settings = settings
        self._answers = answers
        self.marks: OrderedDict[tuple[EndpointState, str], Mark] = OrderedDict()
        """The marks by server and model. The model is empty except for a 404. Only servers that have failed
        lately have a mark. While there are no marks, good answers change nothing.
        """
        self._stalls = Stalls()
        self._cuts = Cuts()

    # -- events ---------------------------------------------------------------------------------------------

    def answered(
        self,
        state: EndpointState,
        *,
        failed: bool,
        model: str = "",
        asked_model: str = "",
        whole: bool = False,
        now: float,
    ) -> None:
        """Take in an answer of a server, good or failed. model: only this model fails. asked_model: the model
        that the request asked for, if known. whole: the answer is known to be complete.
        """
        if state.gone:
            return
        mark = self.marks.get((state, model))
        if not failed and ((mark is not None and mark.stalls) or (state in self._cuts and not whole)):
            return
        if mark is None:
            if not failed:
                return
            mark = self.marks[state, model] = Mark()
            while len(self.marks) > _MOST_MARKS:
                self._drop(next(iter(self.marks)))
        step = _TRIAL_STEP if mark.out and not failed else STEP
        share = mark.now(now)
        mark.share, mark.at = share + step * (float(failed) - share), now
        if failed and not mark.out:
            mark.asked_model, mark.verdict = asked_model or mark.asked_model, None
        if failed and mark.share >= self.settings.share_to_leave_out and not mark.out:
            mark.leave_out(picks=self._answers.picks, now=now)
        elif not failed and mark.out:
            if mark.share < self.settings.share_to_leave_out:
                mark.recover(now=now)  # the trials succeeded
            mark.allow_trial(self.settings.trial_seconds, now=now)  # with the next request

    def answer_cut(self, state: EndpointState, *, now: float) -> None:
        """Count an answer that began well and was cut, as this picker or another one has reported."""
        if not state.gone:
            self._cuts.cut(state)
            self.answered(state, failed=True, now=now)

    def ended(self, state: EndpointState, *, now: float) -> None:
        """Take in that an answer that began well is over, complete or cut."""
        self._cuts.ended(state, now=now)

    def refused_model(self, state: EndpointState, model: str, *, path_hash: int, now: float) -> None:
        """Take in that a server answered 404. The 404 counts only if another server has answered for this
        model at the same path, because clients also name paths that no server has.
        """
        if self._answers.served.get((model, path_hash), state) is not state:
            self.answered(state, failed=True, model=model, now=now)

    def well(self, state: EndpointState, model: str, *, now: float) -> None:
        """Take in that a server answered well for a model."""
        self.answered(state, failed=False, now=now)
        self.answered(state, failed=False, model=model, now=now)

    def forget(self, state: EndpointState) -> None:
        """Forget all marks of a server that has left, or whose name another process has now."""
        for key in [key for key in self.marks if key[0] is state]:
            del self.marks[key]
        self._cuts.forget(state)
        state.overdue = 0
        self._stalls.forget(state)

    def tried(self, state: EndpointState, model: str, *, now: float) -> None:
        """Record that a trial request was sent to the server."""
        for key in ((state, ""), (state, model)):
            mark = self.marks.get(key)
            if mark is not None:
                mark.tried(picks=self._answers.picks, now=now)

    def look(self, *, now: float) -> Sequence[EndpointState]:
        """Judge requests whose first byte is overdue, and forget shares that have become very small. Returns
        the servers that hang from now on.
        """
        for state in self._cuts.whole(now=now):
            self.answered(state, failed=False, whole=True, now=now)
        found = []
        for wait in suspects(self._answers, now=now):
            if not wait.streams and self.settings.probe:
                self._have_probed(wait, now=now)
            elif self.hangs(wait.state, now=now):
                found.append(wait.state)
        for key in [key for key, mark in self.marks.items() if not mark.out and mark.now(now) < _NOTHING]:
            self._drop(key)
        return found

    def _drop(self, key: tuple[EndpointState, str]) -> None:
        del self.marks[key]
        if not key[1]:
            self._cuts.forget(key[0])

    def _have_probed(self, wait: Wait, *, now: float) -> None:
        """Let a probe decide whether a server hangs. Until the probe's result, the server's share stays
        small, also after several calls.
        """
        mark = self.marks.setdefault((wait.state, ""), Mark())
        if not (mark.out or mark.probing):
            mark.asked_model = wait.model or mark.asked_model
            mark.share, mark.at = max(mark.now(now), 2 * _NOTHING), now
            mark.may_stall, mark.verdict = True, None

    def page(
        self,
        state: EndpointState,
        before: EndpointMetrics | None,
        after: EndpointMetrics,
        *,
        now: float,
    ) -> bool:
        """Take in a metrics page. Return whether the page is the first to show that the server hangs."""
        seen = self._stalls.page(state, before, after, hang_seconds=self.settings.hang_seconds, now=now)
        mark = self.marks.get((state, ""))
        if seen == "grew" and mark is not None and counts_answers(after):
            mark.may_stall = False
            if mark.stalls:
                mark.recover(now=now)
        elif seen == "stalls alone":
            news = self.hangs(state, now=now)
            self.marks[state, ""].stalls = True
            return news
        elif seen == "stalls" and (mark is None or not (mark.may_stall or mark.stalls)):
            self.answered(state, failed=True, now=now)
            self.marks[state, ""].may_stall = True
        return False

    def hangs(self, state: EndpointState, *, now: float) -> bool:
        """Leave out a server that hangs, as this picker or another one found. Return whether this is news."""
        if state.gone:
            return False
        mark = self.marks.setdefault((state, ""), Mark())
        news = not mark.hangs
        mark.share, mark.at, mark.hangs = 1.0, now, True
        if not mark.out:
            mark.leave_out(picks=self._answers.picks, now=now)
        return news

    # -- probes ----------------------------------------------------------------------------------------------

    def probes_due(self, *, now: float) -> Sequence[Probe]:
        """Return the probes to send now. Report the result of each to `probed`. A server that has failed is
        probed until a probe succeeds or is unclear. A server that is left out is probed until it is back.
        """
        if not self.marks or not self.settings.probe:
            return ()
        free = _MOST_PROBES - sum(mark.probing for mark in self.marks.values())
        due: list[tuple[float, int, EndpointState, str, Mark]] = []
        trial_s = self.settings.trial_seconds
        for (state, about), mark in self.marks.items():
            every_s = trial_s if mark.out else min(_SUSPECT_PROBES_S, trial_s)
            done = not mark.out and mark.verdict in ("well", "unclear")
            if not (mark.probing or done) and now - mark.probed_at >= every_s and _takes_probes(state):
                due.append((mark.probed_at, len(due), state, about, mark))
        probes = []
        for _, _, state, about, mark in sorted(due)[: max(0, free)]:
            if model := about or mark.asked_model or state.answered_model or state.model:
                mark.probing, mark.probed_at = True, now
                # A queue explains nothing if the counters stand still for longer than the queue should take.
                stands = mark.stalls or mark.may_stall
                queued = _waits_unseen(state) if stands else _has_queue(state, now=now)
                probes.append(Probe(state, model, about, mark, queued=queued))
        return probes

    def probed(self, probe: Probe, verdict: Verdict, *, now: float) -> None:
        mark = self.marks.get((probe.state, probe.about))
        if mark is not probe.mark:
            return  # The probe was sent for an earlier mark.
        mark.probing = False
        if verdict == "well":
            mark.may_stall = False
        if verdict == "ill" and mark.may_stall:
            self.hangs(probe.state, now=now)
            mark.may_stall, mark.stalls = False, True
        elif verdict == "ill" and not mark.out:
            self.answered(probe.state, failed=True, model=probe.about, now=now)
        elif verdict == "well" and (mark.stalls or (mark.verdict == "ill" and probe.state in self._cuts)):
            mark.recover(now=now)
        elif verdict == "well" and mark.out and mark.verdict != "well":
            mark.allow_trial(self.settings.trial_seconds, now=now)
        mark.verdict = verdict

    # -- for picks and for people ---------------------------------------------------------------------

    def onto(self, snapshot: Snapshot, *, model: str, settings: Settings, now: float) -> Snapshot:
        """Return the snapshot with the candidates' failures for a request for `model` filled in."""
        places = snapshot.places_by_slot()
        shares = np.zeros(len(snapshot))
        marks: dict[int, Mark] = {}
        for (state, about), mark in self.marks.items():
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
        if waited >= settings.trial_seconds and self._answers.picks - mark.tried_picks >= _TRIAL_PICKS:
            return True
        return mark.verdict != "ill" and waited >= LONGEST_TRIALS * settings.trial_seconds

    def share(self, state: EndpointState, *, now: float) -> float:
        """Return the share of a server's last answers that failed. Old answers count less."""
        mark = self.marks.get((state, ""))
        return mark.now(now) if mark is not None else 0.0

    def why(self, states: Sequence[EndpointState], *, now: float) -> dict[EndpointState, str]:
        """Return the servers that are left out for all models, and the reasons."""
        marks = {n: m for n, s in enumerate(states) if (m := self.marks.get((s, ""))) is not None}
        if not marks:
            return {}
        shares = np.zeros(len(states))
        for n, mark in marks.items():
            shares[n] = mark.now(now)
        out = self._left_out(shares, marks, self.settings)
        return {states[n]: self._reason(states[n], marks[n]) for n in out}

    @property
    def lacking(self) -> Sequence[tuple[EndpointState, str]]:
        """The servers that lack a model, each with the model. Such a server gets only trial requests for the
        model.
        """
        return [key for key, mark in self.marks.items() if key[1] and mark.out]

    def _reason(self, state: EndpointState, mark: Mark) -> str:
        if mark.hangs:
            return "its requests hang"
        return "its answers break off midway" if state in self._cuts else "its answers fail"

    def check_integrity(self) -> None:
        assert len(self.marks) <= _MOST_MARKS
        assert all(0.0 <= mark.share <= 1.0 for mark in self.marks.values())
        assert all((state, "") in self.marks for state in self._cuts.states())
        self._cuts.check_integrity()
        self._stalls.check_integrity()


def is_fault(status: int) -> bool:
    """Return whether an answer of this status shows a sick server. Other errors are the client's. vLLM
    answers 501 if the model does not have the API that the client asks for.
    """
    return (status >= 500 and status != 501) or status == 429


def _takes_probes(state: EndpointState) -> bool:
    """Return whether the endpoint answers clients itself. Ranks of a server share one address."""
    return state.endpoint.role.answers and state.endpoint.rank is None


def _waits_unseen(state: EndpointState) -> bool:
    """Return whether the server has a queue, and its counters would not show that the queue moves."""
    page = state.metrics
    return page is not None and page.counts_at_end and bool(page.waiting)


def _has_queue(state: EndpointState, *, now: float) -> bool:
    """Return whether the server has a queue, by its page or by the tokens that it still has to compute."""
    rate = state.tokens_per_s
    waiting = state.metrics.waiting if state.metrics is not None else None
    return bool(waiting) or state.backlog.undone_tokens(now=now, rate=rate) > rate * _QUEUE_S
