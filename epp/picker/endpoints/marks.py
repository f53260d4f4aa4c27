"""Holds what the picker remembers about a server that has failed recently, and the probes that it sends
there. `failures` owns these objects. `Form` is the table of all ways in which a server fails.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal

from epp.config.policy import FailureSettings
from epp.picker.endpoints.endpoint_state import EndpointState

STEP: Final = 0.2
"""How far one answer moves the share: four failures in a row take a server from 0 over a half. A good answer
of an ejected server moves it twice as far, so two bring it back under a half.
"""
_HALF_LIFE_S: Final = 5.0
"""Half-life of the share of a server that is not ejected."""
_TRIAL_PICKS: Final = 64
"""Requests from one trial to the next, unless `_LONGEST_TRIALS` trial intervals have passed. Only those count
that the server could serve. Otherwise most requests for a model that is seldom asked for would be trials.
"""
_LONGEST_TRIALS: Final = 4.0
"""A trial is due after this many trial intervals, even if few requests came."""

Verdict = Literal["well", "ill", "refused", "unclear"]
"""The result of a probe. refused: the server answered 3xx or 4xx. unclear: the probe proves nothing."""


class Proof(enum.IntEnum):
    """What an answer has shown so far."""

    BEGUN = 0
    """It began with 2xx."""
    WHOLE = 1
    """It ended, and nobody has reported a cut within a second."""
    TOKEN = 2
    """A token stood in its body."""
    COUNTED = 3
    """Its server's counters grew, or a probe got a token."""


class Form(enum.Enum):
    """How an answer, or the lack of one, is bad. Each form has the least proof that a later answer of this
    server is good, and the reason why the server is ejected, for people.
    """

    FAILS = Proof.BEGUN, "its answers fail"
    """The status is a 5xx or 429, or the connection broke before the answer."""
    LACKS = Proof.BEGUN, "it answers 404"
    """A 404 for a model and a path for which another server answers."""
    REFUSES = Proof.BEGUN, "it refuses requests that other servers answer"
    """A 3xx or another 4xx, where another server answers at this path. A probe has to confirm it."""
    CUTS = Proof.WHOLE, "its answers break off midway"
    TELLS = Proof.TOKEN, "its answers begin and then tell of an error"
    """The body of an answer has an error."""
    BARE = Proof.TOKEN, "its answers lack a token or their end"
    """The body of an answer lacks a token or its own end, and those of other servers do not."""
    HANGS = Proof.BEGUN, "its requests hang"
    """First bytes are overdue."""
    STALLS = Proof.COUNTED, "its requests hang"
    """Answers begin, and the server's counters stand still. A probe has to confirm it."""
    IS_EMPTY = Proof.COUNTED, "its answers end without a token"
    """Answers begin and end, and the server's counters stand still. A probe has to confirm it."""

    def __init__(self, proof: Proof, why: str) -> None:
        self.proof = proof
        self.why = why


@dataclass(slots=True, eq=False)
class Probe:
    """A request of one token that the picker should send."""

    state: EndpointState
    """The server that is asked."""
    model: str
    """The model that the probe asks for. Never empty."""
    mark: Mark
    """The picker's knowledge of the suspected server at the time of the probe."""
    queued: bool = False
    """Whether other requests wait at the server, so that a late answer proves nothing."""


@dataclass(slots=True, eq=False)
class Mark:
    """The record of one server's failures, at all models or at one model."""

    state: EndpointState
    about: str
    """The model that fails, if only one model fails. Empty: the server fails at all models."""
    share: float = 0.0
    at: float = 0.0
    """When the share was true. The share halves every `_HALF_LIFE_S` from then on, unless the server is
    ejected.
    """
    out: bool = False
    """Whether the share was over the limit and has not come back under it."""
    times_out: int = 0
    """How often the server was ejected."""
    form: Form = Form.FAILS
    """The form of the last failure."""
    needs: Proof = Proof.BEGUN
    """The least proof of a good answer."""
    suspected: Form | None = None
    """A form of failure that only a probe can confirm. The share stays small until then."""
    ends: deque[float] = field(default_factory=deque)
    """When answers ended that may still turn out to be cut. Only servers that have cut answers have ends."""
    tried_at: float = 0.0
    """When the last trial was sent, or when the server was first ejected."""
    picks: int = 0
    """Requests for what fails, to any server, since the last trial was sent."""
    asked_model: str = ""
    """The model that the last failed request asked for. Empty: not known."""
    verdict: Verdict | None = None
    """Result of the last probe. None: there was no probe since the last failure, or since the server was
    ejected."""
    control: EndpointState | None = None
    """Another server, which answers what this one refuses. If this one refuses a probe too, the control gets
    the same probe.
    """
    refusals_prove: bool | None = None
    """Whether a refused probe proves a fault, because the control answered it. None: not known yet."""
    probed_at: float = -inf
    probing: bool = False

    def now(self, now: float) -> float:
        return self.share if self.out else self.share * 0.5 ** (max(0.0, now - self.at) / _HALF_LIFE_S)

    @property
    def hangs(self) -> bool:
        """Whether the server is ejected because its requests hang."""
        return self.out and self.form in (Form.HANGS, Form.STALLS)

    def move(self, *, failed: bool, now: float) -> None:
        """Move the share by one answer."""
        share = self.now(now)
        step = STEP
        if not failed and share > STEP:
            step = 2 * STEP / min(self.times_out, 4) if self.out else STEP / 5
        self.share, self.at = share + step * (float(failed) - share), now

    def fail(self, form: Form, model: str, *, share_to_eject: float, now: float) -> None:
        """Take in a bad answer. model: that of the request, if known."""
        self.move(failed=True, now=now)
        self.form, self.needs = form, max(self.needs, form.proof)
        if form is Form.CUTS and self.ends:
            self.ends.popleft()  # one of the answers that ended was cut
        if not self.out:
            self.asked_model, self.verdict = model or self.asked_model, None
            if self.share >= share_to_eject:
                self.eject(now=now)

    def eject(self, *, now: float) -> None:
        """Give the server only trial requests from now on."""
        self.out, self.verdict = True, None
        self.times_out += 1
        self.tried(now=now)

    def tried(self, *, now: float) -> None:
        """Note that a trial was sent, or that the wait for the first trial begins."""
        self.tried_at, self.picks = now, 0

    def allow_trial(self, trial_s: float, *, now: float) -> None:
        """Let the next request be a trial, unless the last probe failed: the server is then good in part."""
        self.tried_at = now - _LONGEST_TRIALS * trial_s

    def trial_is_due(self, settings: FailureSettings, *, now: float) -> bool:
        waited = now - self.tried_at
        if self.needs is Proof.COUNTED and self.verdict == "ill" and settings.probe:
            return False  # a trial would prove nothing
        if waited >= settings.trial_seconds and self.picks >= _TRIAL_PICKS:
            return True
        return self.verdict != "ill" and waited >= _LONGEST_TRIALS * settings.trial_seconds

    def recover(self, most: float = STEP, *, now: float) -> None:
        """Take the server back, since it is well again. Its mark is at most that of one failure."""
        self.out, self.suspected = False, None
        if self.needs is Proof.COUNTED:
            self.needs = Proof.BEGUN
        self.ends.clear()
        self.share, self.at = min(self.share, most), now


def is_fault(status: int) -> bool:
    """Return whether an answer of this status shows a sick server. Other errors are the client's. vLLM
    answers 501 if the model does not have the API that the client asks for.
    """
    return (status >= 500 and status != 501) or status == 429
