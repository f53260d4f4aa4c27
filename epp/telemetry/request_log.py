"""Log lines about single requests that an operator should see. They name the request id and never contain
prompt text.

Called by `metrics`, which gets every event.
"""

from __future__ import annotations

import logging

from epp.decision import Decision
from epp.errors import PickError

_log = logging.getLogger("epp.requests")


def refused(request_id: str, error: PickError) -> None:
    level = logging.WARNING if error.status >= 500 else logging.INFO
    _log.log(
        level,
        "refused: %s",
        error,
        extra={"request_id": request_id, "status": error.status, "reason": error.reason},
    )


def picked(decision: Decision) -> None:
    if _log.isEnabledFor(logging.DEBUG):
        extra = {"request_id": decision.request_id, "endpoint": decision.chosen, "reason": decision.reason}
        _log.debug("picked", extra=extra)


def moved(decision: Decision) -> None:
    extra = {"request_id": decision.request_id, "endpoint": decision.chosen, "served": str(decision.served)}
    _log.info("served by another endpoint than the first choice", extra=extra)


def ended(decision: Decision) -> None:
    if decision.outcome == "failed":
        extra = {"request_id": decision.request_id, "served": str(decision.served), "status": decision.status}
        _log.warning("the model server failed", extra=extra)
