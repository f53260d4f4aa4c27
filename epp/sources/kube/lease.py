"""Decides which of several replicas writes status: the holder of a Lease. Pure; `lease_holder` sends the
requests.

The rules are those of Kubernetes' own components. A replica may take a lease that its holder has not renewed
for `duration_s`. The replica measures this with its own clock, from the last renewal that it saw, so clocks
of two machines are never compared. A holder regards itself as the holder only for two thirds of this time
after it sent its last renewal, so two replicas never hold the lease at once. Every write contains the version
that was read, so if two replicas try to take the lease, one of them fails.

kubernetes.aio.leaderelection implements such a lease too. But it writes local time, does not release the
lease at its end (so at every rolling update the next holder waits for the lease to expire), and ends the
process with `sys.exit` on an error.
"""

from __future__ import annotations

from typing import Final, Literal

from epp.sources.kube.objects import Lease, LeaseSpec

_HOLDS_RATIO: Final = 2 / 3

Step = Literal["create", "take", "renew", "wait"]


class Election:
    """One candidate. Times are monotonic seconds."""

    def __init__(self, *, identity: str, duration_s: float) -> None:
        self._identity = identity
        self._duration_s = duration_s
        self._seen: LeaseSpec | None = None
        self._seen_at = 0.0
        self._renewed_at: float | None = None

    def step(self, lease: Lease | None, *, now: float) -> Step:
        """Return the action to take after reading the lease. None: there is no lease yet."""
        if lease is None:
            self._seen = None
            return "create"
        if lease.spec != self._seen:
            self._seen, self._seen_at = lease.spec, now
        if lease.spec.holder_identity == self._identity:
            return "renew"
        self._renewed_at = None
        if not lease.spec.holder_identity:
            return "take"
        promised_s = lease.spec.lease_duration_seconds or self._duration_s
        return "take" if now - self._seen_at > promised_s else "wait"

    def renewed(self, *, sent_at: float) -> None:
        """Called when the API server accepted our name. The request was sent at `sent_at`."""
        self._renewed_at = sent_at

    def lost(self) -> None:
        self._renewed_at = None

    def holds(self, *, now: float) -> bool:
        return self._renewed_at is not None and now - self._renewed_at < _HOLDS_RATIO * self._duration_s

    def spec(self, step: Step, *, time_text: str) -> LeaseSpec:
        """Return the spec of the lease to write, after a `step` that writes."""
        assert step != "wait", "nothing to write"
        before = self._seen or LeaseSpec()
        renewing = step == "renew"
        return LeaseSpec(
            holder_identity=self._identity,
            lease_duration_seconds=max(1, int(self._duration_s)),
            acquire_time=before.acquire_time if renewing else time_text,
            renew_time=time_text,
            lease_transitions=(before.lease_transitions or 0) + (step == "take"),
        )
