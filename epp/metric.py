"""Declares a metric as the annotation of the field or property that holds its number.

`in_flight: Annotated[int, gauge("epp_endpoint_in_flight", "Requests ...")]` is a whole declaration.
`telemetry.catalog` says where the objects with such fields are, and `telemetry.exposition` reads them. A
field may hold:
- a number; None means that there is nothing to show;
- text, which becomes the value of a label; the value of the series is always 1;
- a mapping from label values (one, or a tuple of several) to numbers;
- a distribution, for a histogram.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric as Prometheus sees it. Names of counters end in `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    """Labels of the values of this field. The labels of its object come before them."""


def counter(name: str, text: str, *labels: str) -> Metric:
    """A number that only grows."""
    return Metric(name, "counter", text, labels)


def gauge(name: str, text: str, *labels: str) -> Metric:
    """A number that may grow and shrink."""
    return Metric(name, "gauge", text, labels)


def histogram(name: str, text: str) -> Metric:
    """How many values were at most each bound. The field is a `telemetry.counts.Distribution`."""
    return Metric(name, "histogram", text)
