"""Holds what the picker remembers about a server that has failed recently, and the probes that it sends
there. `failures` owns these objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final, Literal

from epp.endpoints.endpoint_state import EndpointState

STEP: Final = 0.2
"""How far one answer moves the share: four failures in a row take a server from 0 over a half."""
_HALF_LIFE_S: Final = 5.0
"""Half-life of the share of a server that is not left out."""
LONGEST_TRIALS: Final = 4.0
"""A trial is due after this many trial intervals, even if few requests came."""


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
    """The picker's knowledge of the server at the time of the probe."""
    queued: bool = False
    """Whether other requests wait at the server, so that a late answer proves nothing."""


@dataclass(slots=True, eq=False)
class Mark:
    """The record of one server's failures, at all models or at one model."""

    share: float = 0.0
    at: float = 0.0
    """When the share was true. The share halves every `_HALF_LIFE_S` from then on, unless the server is left
    out.
    """
    out: bool = False
    """Whether the share was over the limit and has not come back under it."""
    hangs: bool = False
    stalls: bool = False
    """Whether the server hangs although its answers begin. Then the beginning of an answer proves nothing."""
    tried_at: float = 0.0
    """When the last trial was sent, or when the server was first left out."""
    tried_picks: int = 0
    may_stall: bool = False
    """Whether the server may hang: its counters stand still while no other server is busy, or answers that
    are not streamed take long and nothing counts their tokens. The next probe decides."""
    asked_model: str = ""
    """The model that the last failed request asked for. Empty: not known."""
    verdict: Verdict | None = None
    """Result of the last probe. None: there was no probe since the last failure, or since the server was left
    out."""
    probed_at: float = -inf
    probing: bool = False

    def now(self, now: float) -> float:
        return self.share if self.out else self.share * 0.5 ** (max(0.0, now - self.at) / _HALF_LIFE_S)

    def leave_out(self, *, picks: int, now: float) -> None:
        """Give the server only trial requests from now on."""
        self.out, self.verdict = True, None
        self.tried(picks=picks, now=now)

    def tried(self, *, picks: int, now: float) -> None:
        """Note that a trial was sent, or that the wait for the first trial begins. picks: the requests so
        far.
        """
        self.tried_at, self.tried_picks = now, picks

    def allow_trial(self, trial_s: float, *, now: float) -> None:
        """Let the next request be a trial."""
        self.tried_at = now - LONGEST_TRIALS * trial_s

    def recover(self, *, now: float) -> None:
        """Take the server back, since it is well again. Its mark is the same as after one failure."""
        self.out = self.hangs = self.stalls = False
        self.share, self.at = min(self.share, STEP), now
