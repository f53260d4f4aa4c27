"""Finds servers that fail more than the others, from their answers and from answers that never come.

A server that answers badly at once, or hangs while its metrics look fine, always seems idle, so every rule by
load or cost would send it more requests. Each answer moves the failure share of its server, which is an
average of the last answers. This share raises the price of the server. From `shareToEject` on the server
is ejected, as long as it fails more than the others and not too many servers are ejected already. A server
that is ejected gets a trial request now and then, and comes back with its first good answers.

`marks.Form` is the table of the forms of failure. Each form says what a later answer has to prove: if answers
begin well and then fail, the beginning of an answer proves nothing. Some forms are only suspicions. A
suspicion raises the price a little, and a probe confirms it or not.

Where requests are few, their answers would show too late that a server fails, or that it has recovered. So
the picker probes a server that has failed: it sends a request of one token (`probes_due`; `scraping.probes`
sends it). A probe that fails counts as a failed answer. Until a probe succeeds, only one of 64
requests is a trial. A probe that succeeds proves less than a real answer: mostly it only allows a trial.

Pure: times are monotonic seconds. `Fleet` owns this object. The picker reports bad answers. While there is a
mark, it reports all answers, and `sharing` reports those of other pickers.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final

import numpy as np

from epp.base.types import EndpointMetrics
from epp.config.policy import FailureSettings as Settings
from epp.picker.endpoints.answers import LATELY_S, MOST_ENDS, Answers, counts_answers, may_wait
from epp.picker.endpoints.endpoint_state import PAGE_AGE_S, Account, EndpointState
from epp.picker.endpoints.marks import STEP, Form, Mark, Probe, Proof, Verdict
from epp.picker.scheduling.snapshot import MOST_KEPT, Floats, Snapshot

_NOTHING: Final = 0.06
"""A smaller share is forgotten, which takes 9 s after a single failure. Until then a server that is well
again gets no request on an idle fleet, because even a small share adds more to the cost than the difference
between servers.
"""
_MOST_PROBES: Final = 32
"""The largest number of probes that one picker has open at a time."""
_SEVERAL: Final = 3
"""A server is suspected after so many refusals or bare answers in a row. Clients often send one or two bad
requests."""
_REFUTED_S: Final = 60.0
"""For this long after two servers have refused about as many requests in a row, refusals count against none.
The same holds for bare answers.
For this long after a probe got a token, counters that stand still show nothing, unless they have grown since.
"""


class FailingServers:
    """Keeps the marks of servers that fail, and says which servers are ejected, tried or probed."""

    def __init__(self, settings: Settings, answers: Answers) -> None:
        self.settings = settings
        self._answers = answers
        self.marks: OrderedDict[tuple[EndpointState, str], Mark] = OrderedDict()
        """The marks by server and model. The model is empty except for a 404. Only servers that have failed
        lately have a mark. While there are no marks, good answers change nothing.
        """
        self._rows: dict[Form, dict[EndpointState, tuple[int, float]]] = {Form.REFUSES: {}, Form.BARE: {}}
        """How many answers of this form a server gave in a row, and when it gave the last one."""
        self._clients_fault_until = dict.fromkeys(self._rows, -inf)

    # -- events ---------------------------------------------------------------------------------------------

    def failed(self, state: EndpointState, form: Form, model: str = "", *, now: float) -> None:
        """Take in a bad answer. model: that of the request, if known. If the form is LACKS, only this model
        fails.
        """
        if state.gone:
            return
        mark = self._mark(state, model if form is Form.LACKS else "")
        mark.fail(form, model, share_to_eject=self.settings.share_to_eject, now=now)

    def good(self, state: EndpointState, model: str = "", *, proof: Proof, now: float) -> None:
        """Take in an answer for this model that is good, as far as the proof goes. It counts if a mark needs
        no more.
        """
        for mark in self._marks_for(state, model):
            if proof < mark.needs:
                continue
            mark.move(failed=False, now=now)
            if mark.suspected is not None:
                mark.recover(0.0, now=now)  # it does not refuse everything
            if mark.out:
                # If it was ejected again, a part of its answers is good, so more good ones are needed.
                again = mark.times_out > 1
                if mark.share < self.settings.share_to_eject - STEP * again:
                    mark.recover(now=now)  # the trials succeeded
                mark.allow_trial(self.settings.trial_seconds, now=now)  # with the next request

    def ended(self, state: EndpointState, *, now: float) -> None:
        """Take in that an answer that began well is over, complete or cut."""
        mark = self.marks.get((state, ""))
        # More are not needed to see that most answers are complete. The oldest ends stay. If newer ends
        # replaced them, none of a busy server's ends would ever be old enough.
        if mark is not None and mark.needs is Proof.WHOLE and len(mark.ends) < MOST_ENDS:
            mark.ends.append(now)

    def compare(self, state: EndpointState, form: Form, model: str, *, path_hash: int, now: float) -> bool:
        """Compare the server with others after an answer that may be its client's own fault: a 3xx, a 4xx, or
        a bare one. Return whether it counts as a failure: a 404 if another server has answered for this model
        at the same path, other refusals if several come in a row at this server alone, unless a probe can
        tell more, and bare answers if, besides, a token was read at that other server, and the row is too
        long to be chance.
        """
        if state.gone:
            return False
        account, mark = state.account, self.marks.get((state, ""))
        other = self._answers.other_that_served(state, model, path_hash=path_hash)
        account.refused += form is Form.REFUSES
        if form is Form.LACKS:
            counts = other is not None  # clients also name paths that no server has
        elif form is Form.BARE:
            self._answers.bare(state, other)
            alone = self._is_alone(state, form, account.bare, now=now)
            row = account.bare + (_SEVERAL - 1 if mark is not None and mark.form is form else 0)
            counts = alone and row >= _SEVERAL and other is not None and other.account.read_at > -inf
            # If such answers were as usual here as at the others, such a row would be a chance of 1 in 200.
            counts = counts and self._part_of_others(state) ** row < 0.005
        elif mark is not None and mark.out:
            counts = mark.form is form
        elif account.refused < _SEVERAL:
            counts = False
        elif self._may_probe(state) and (mark is None or mark.refusals_prove is not False):
            mark = self._suspect(state, form, model, now=now)
            mark.control = other or mark.control
            counts = False  # a probe decides
        else:
            counts = self._is_alone(state, form, account.refused, now=now)
        if counts:
            self.failed(state, form, model, now=now)
            if form is Form.BARE:
                mark = self._mark(state, "")
                mark.share = max(mark.share, 2 * STEP)  # the next one ejects it
        return counts

    def _part_of_others(self, state: EndpointState) -> float:
        """Return the largest part of bare answers that another server has, of those that are not ejected."""
        out = {mark.state for mark in self.marks.values() if mark.out}
        others = [each for each in self._rows[Form.BARE] if each is not state and each not in out]
        return max((each.account.bare_part for each in others), default=0.0)

    def _is_alone(self, state: EndpointState, form: Form, row: int, *, now: float) -> bool:
        """Return whether lately no other server has given about as many answers of this form in a row. If one
        has, then the requests are at fault, and ejected servers come back.
        """
        rows = self._rows[form]
        rows[state] = row, now
        if any(  # where clients are at fault, the first servers show it
            other is not state and now - at < _REFUTED_S and _SEVERAL <= max(row, many) <= 2 * min(row, many)
            for other, (many, at) in rows.items()
        ):
            self._clients_fault_until[form] = now + _REFUTED_S
        alone = now >= self._clients_fault_until[form]
        for mark in self.marks.values():
            if not alone and mark.out and mark.form is form:
                mark.recover(now=now)
        return alone

    def forget(self, state: EndpointState) -> None:
        """Forget all marks of a server that has left, or whose name another process has now."""
        for key in [key for key in self.marks if key[0] is state]:
            del self.marks[key]
        for rows in self._rows.values():
            rows.pop(state, None)
        state.account = Account()
        state.changed.add(state.slot)

    def tried(self, state: EndpointState, model: str, *, now: float) -> None:
        """Record that a trial request was sent to the server."""
        for mark in self._marks_for(state, model):
            mark.tried(now=now)

    def sent(self, state: EndpointState, model: str, *, now: float) -> bool:
        """Take in that a request was sent to this server. Return whether its answer has to be read: at most
        eight at once and eight in a second of one server, whatever clients ask for.
        """
        base_model = state.model
        for each in self.marks.values():
            each.picks += each.about in ("", model) and each.state.model == base_model
        account = state.account
        doubted, account.doubted = account.doubted, account.bare > 0
        mark = self.marks.get((state, ""))
        read_until = max(account.read_until, now - LATELY_S) + LATELY_S / 8
        if read_until > now or not (doubted or (mark is not None and mark.needs is Proof.TOKEN)):
            return False
        account.read_until = read_until
        return True

    def look(self, *, now: float) -> None:
        """Judge answers that nobody has reported as cut, and forget shares that have become very small."""
        for mark in self.marks.values():
            # Envoy reports a cut answer within this time, because it sends its log every 0.25 s.
            while mark.ends and mark.ends[0] <= now - LATELY_S:
                mark.ends.popleft()
                self.good(mark.state, proof=Proof.WHOLE, now=now)
        for key in [key for key, mark in self.marks.items() if not mark.out and mark.now(now) < _NOTHING]:
            del self.marks[key]

    def _marks_for(self, state: EndpointState, model: str) -> Sequence[Mark]:
        """Return the marks of a server that count for a request for this model."""
        return [mark for about in {"", model} if (mark := self.marks.get((state, about))) is not None]

    def _mark(self, state: EndpointState, about: str) -> Mark:
        mark = self.marks.get((state, about))
        if mark is None:
            mark = self.marks[state, about] = Mark(state, about)
            while len(self.marks) > MOST_KEPT:
                self.marks.popitem(last=False)
        return mark

    def _suspect(self, state: EndpointState, form: Form, model: str = "", *, now: float) -> Mark:
        """Let a probe decide whether a server fails in this form. Until the probe's result, the server's
        share is at least that of one failure, also after several calls.
        """
        mark = self._mark(state, "")
        if not (mark.out or mark.probing or mark.verdict == "refused"):
            mark.asked_model = model or mark.asked_model
            mark.share, mark.at = max(mark.now(now), STEP), now
            mark.suspected, mark.needs, mark.verdict = form, max(mark.needs, form.proof), None
        return mark

    def page(self, state: EndpointState, after: EndpointMetrics | None, *, now: float) -> bool:
        """Take in the next metrics page. None: it could not be read. Return whether this is the first look
        that shows that the server hangs.
        """
        seen = self._answers.look(state, after, hang_seconds=self.settings.hang_seconds, now=now)
        account, mark = state.account, self.marks.get((state, ""))
        if self.refuted(state, now=now) and seen in ("idle", "stalls", "stalls alone"):
            return False
        if seen in ("hangs", "stalls alone"):
            return self.convict(state, Form.HANGS if seen == "hangs" else Form.STALLS, now=now)
        if seen in ("stalls", "may hang"):
            self._suspect(state, Form.STALLS, now=now)
        elif seen != "moves":
            if after is not None and account.uncounted_end_at < after.scraped_at - PAGE_AGE_S:
                self._suspect(state, Form.IS_EMPTY, now=now)
        elif state.metrics is not None and after is not None:
            account.grew_at = now
            if mark is not None and mark.needs is Proof.COUNTED and counts_answers(after):
                mark.recover(now=now)
        return False

    def convict(self, state: EndpointState, form: Form = Form.HANGS, *, now: float) -> bool:
        """Eject a server at once, as this picker or another one found. Return whether it is news that its
        requests hang.
        """
        if state.gone:
            return False
        mark = self._mark(state, "")
        news = not mark.hangs
        mark.share, mark.at, mark.suspected = 1.0, now, None
        mark.form, mark.needs = form, max(mark.needs, form.proof)
        if not mark.out:
            mark.eject(now=now)
        return news

    def refuted(self, state: EndpointState, *, now: float) -> bool:
        """Return whether a probe got a token lately, and the page's counters have not grown since."""
        return state.account.grew_at < state.account.refuted_at > now - _REFUTED_S

    def proved_to_hang(self, state: EndpointState) -> bool:
        """Return whether a server is ejected because its requests hang, and its last probe does not deny it.
        The first probe is waited for, if there are probes.
        """
        mark = self.marks.get((state, ""))
        if mark is None or not mark.hangs:
            return False
        return mark.verdict in ("ill", "unclear") or not self._may_probe(state)

    # -- probes ----------------------------------------------------------------------------------------------

    def _may_probe(self, state: EndpointState) -> bool:
        """Return whether the server may be probed. It has to answer clients itself, under its own address,
        which the ranks of a server share.
        """
        endpoint = state.endpoint
        return self.settings.probe and endpoint.role.answers and endpoint.rank is None

    def probes_due(self, *, now: float) -> Sequence[Probe]:
        """Return the probes to send now. Report the result of each to `probed`. A server that has failed is
        probed until a probe succeeds or is unclear. An ejected server is probed until it is back.
        """
        free = _MOST_PROBES - sum(mark.probing for mark in self.marks.values())
        due: list[Mark] = []
        trial_s = self.settings.trial_seconds
        for mark in self.marks.values():
            every_s = trial_s if mark.out else min(0.5, trial_s)
            waits = now - mark.probed_at < every_s and mark.verdict != "refused"
            done = not mark.out and mark.verdict in ("well", "unclear")
            if not (mark.probing or done or waits) and self._may_probe(mark.state):
                due.append(mark)
        probes = []
        for mark in sorted(due, key=lambda mark: mark.probed_at)[: max(0, free)]:
            if mark.control is not None and mark.control.gone:
                mark.control = None
            state, control = mark.state, mark.control
            if model := mark.about or mark.asked_model or state.account.model or state.model:
                asked = control if mark.verdict == "refused" and control is not None else state
                mark.probing, mark.probed_at = True, now
                asked.backlog.unbegun += 1  # no booking waits for its first token
                queued = may_wait(asked, stands=mark.needs is Proof.COUNTED, now=now)
                probes.append(Probe(asked, model, mark, queued=queued))
        return probes

    def probed(self, probe: Probe, verdict: Verdict, *, now: float) -> None:
        mark, state, backlog = probe.mark, probe.mark.state, probe.state.backlog
        if verdict != "well" and backlog.unbegun:
            backlog.unbegun -= 1  # no page counts a first token of it
        if self.marks.get((state, mark.about)) is not mark:
            return  # The probe was sent for an earlier mark.
        mark.probing = False
        if probe.state is not state and verdict in ("ill", "unclear"):
            mark.verdict = None  # the control proves nothing now, so both are asked again
            return
        if probe.state is not state:
            mark.refusals_prove, verdict = verdict == "well", "refused"
        elif verdict == "refused" and mark.control is not None and mark.refusals_prove is None:
            mark.verdict = "refused"  # the control is asked next
            return
        if verdict == "refused":
            mark.refusals_prove = bool(mark.refusals_prove)
            verdict = "ill" if mark.refusals_prove else "unclear"
        if verdict == "ill" and mark.suspected is not None:
            self.convict(state, mark.suspected, now=now)
        elif verdict == "ill" and not mark.out:
            self.failed(state, mark.form, mark.about, now=now)
        elif verdict == "well":
            self._probed_well(mark, now=now)
        mark.verdict = verdict

    def _probed_well(self, mark: Mark, *, now: float) -> None:
        """Take a server back if probes show its faults. Otherwise real answers may still fail, so the probe
        only allows a trial.
        """
        account = mark.state.account
        account.refused, account.read_at, account.refuted_at = 0, now, mark.probed_at
        account.stands_since, account.patience_s = now, 0.0
        refuses = mark.form is Form.REFUSES and mark.refusals_prove is not False
        # If it had to be ejected again after a recovery, then a part of its answers is good.
        all_fail = mark.needs > Proof.BEGUN and mark.verdict == "ill" and mark.times_out == 1
        proves = mark.needs is Proof.COUNTED or (mark.out and all_fail)
        if mark.suspected is Form.REFUSES:
            mark.recover(0.0, now=now)  # the requests were at fault
        elif refuses or proves or mark.suspected is not None:
            mark.recover(now=now)
        elif mark.out and mark.verdict != "well":
            mark.allow_trial(self.settings.trial_seconds, now=now)

    # -- for picks and for people ---------------------------------------------------------------------

    def seen(self, snapshot: Snapshot, *, model: str, settings: Settings, now: float) -> dict[str, Any]:
        """Return the columns of the snapshot that say how the candidates fail for a request for `model`."""
        shares, marks = self._worst(snapshot.place, len(snapshot), model, now=now)
        if not marks:
            return {}
        out = self._ejected(shares, marks, settings)
        mask = np.zeros(len(snapshot), dtype=np.bool_)
        mask[out] = True
        # Servers that are not ejected only because others fail more need trials too. Otherwise their shares
        # would never fall.
        due = [place for place, m in marks.items() if m.out and m.trial_is_due(settings, now=now)]
        trials = sorted(due, key=lambda place: marks[place].tried_at) if settings.max_ejected_share else []
        return {"failure_share": shares, "failing": mask if out else None, "trials": trials}

    def _worst(
        self, place_of: Callable[[int], int | None], count: int, model: str, *, now: float
    ) -> tuple[Floats, dict[int, Mark]]:
        """Return the failure share at each place, for requests for this model, and the mark that it comes
        from. place_of: returns the place of a slot. count: the number of places.
        """
        shares, marks = np.zeros(count), {}
        for mark in self.marks.values():
            place = place_of(mark.state.slot) if mark.about in ("", model) else None
            if place is not None and (share := mark.now(now)) > shares[place]:
                shares[place], marks[place] = share, mark
        return shares, marks

    def _ejected(self, shares: Floats, marks: dict[int, Mark], settings: Settings) -> list[int]:
        most = int(settings.max_ejected_share * len(shares))
        least = shares.mean() + 0.2  # who fails as much as the others is not ejected
        out = [place for place, mark in marks.items() if mark.out and shares[place] >= least]
        return sorted(out, key=lambda place: -shares[place])[:most]

    def share(self, state: EndpointState, *, now: float) -> float:
        """Return the share of a server's last answers that failed. Old answers count less."""
        return mark.now(now) if (mark := self.marks.get((state, ""))) is not None else 0.0

    def why(self, states: Sequence[EndpointState], *, now: float) -> dict[EndpointState, str]:
        """Return the servers that are ejected for all models, and the reasons."""
        shares, marks = self._worst({s.slot: n for n, s in enumerate(states)}.get, len(states), "", now=now)
        if not marks:
            return {}
        out = self._ejected(shares, marks, self.settings)
        return {states[n]: marks[n].form.why for n in out}

    @property
    def lacking(self) -> Sequence[tuple[EndpointState, str]]:
        """The servers that lack a model, each with the model. Such a server gets only trial requests for the
        model.
        """
        return [key for key, mark in self.marks.items() if key[1] and mark.out]
