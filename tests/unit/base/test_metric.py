"""Metrics that are declared as the defaults of fields."""

from __future__ import annotations

from dataclasses import dataclass, fields

from epp.base.metric import Metric, counter, gauge, histogram
from epp.observe.telemetry.counts import Distribution


@dataclass
class Counts:
    served: int = counter("epp_served_total", "Requests served.", default=0)
    waiting: dict[str, int] = gauge("epp_waiting", "Requests that wait.", "tenant", default_factory=dict)
    seconds: Distribution = histogram(
        "epp_seconds", "Time.", default_factory=lambda: Distribution((0.1, 1.0))
    )
    remark: str = ""


def declared() -> dict[str, Metric | None]:
    return {each.name: each.metadata.get("metric") for each in fields(Counts)}


def test_a_declaration_is_also_the_default_of_its_field() -> None:
    one, other = Counts(), Counts()
    assert (one.served, one.waiting) == (0, {})
    one.waiting["a"] = 1
    assert other.waiting == {}, "each object has a mapping of its own"


def test_a_declaration_has_name_kind_help_and_labels() -> None:
    assert declared() == {
        "served": Metric("epp_served_total", "counter", "Requests served."),
        "waiting": Metric("epp_waiting", "gauge", "Requests that wait.", ("tenant",)),
        "seconds": Metric("epp_seconds", "histogram", "Time."),
        "remark": None,
    }
