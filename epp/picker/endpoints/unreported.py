"""Estimates how many requests other pickers have sent lately that this picker does not know of yet, by base
model. No estimate is below 0.

Each request is reported some time after it was sent. By Little's law the number of requests that are not
reported yet is their rate times this delay. So the estimate is the sum of the delays of all reports of about
the last second. The listener of `sharing` passes in each report, and picks read the estimate.
"""

from math import exp


class Unreported:
    __slots__ = ("of_models",)

    def __init__(self) -> None:
        self.of_models: dict[str, tuple[float, float]] = {}
        """The estimate for each base model, and when it was made. Empty: pickers do not share."""

    def reported(self, model: str, *, age_s: float, now: float) -> None:
        """Count a request for this base model that another picker has reported now and sent `age_s` ago. A
        report that is older than a second came after an interruption, so it counts as a second old.
        """
        picks = self.picks(model, now=now) + min(max(age_s, 0.0), 1.0)
        self.of_models[model] = picks, now

    def picks(self, model: str, *, now: float) -> float:
        """Return the estimate. 0 where pickers do not share."""
        picks, at = self.of_models.get(model, (0.0, now))
        return picks * exp(min(0.0, at - now))
