"""Declares a metric as the default of the field that holds its number.

`in_flight: int = gauge("epp_endpoint_in_flight", "Requests ...")` is a whole declaration in a dataclass. The
field begins at 0, or with no series if its values have labels, unless `default` or `default_factory` says
otherwise, as in `dataclasses.field`.
`telemetry.metrics` says where the objects with such fields are, and reads them. A field may hold:
- a number, or None if there is nothing to show;
- text, which becomes the value of a label, while the value of the series is always 1;
- a mapping from label values (one, or a tuple of several) to numbers;
- a distribution, for a histogram.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric as Prometheus sees it. Names of counters end in `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    """Labels of the values of this field. The labels of its object come before them."""


def counter(name: str, text: str, *labels: str, **default: Any) -> Any:
    """Declare a number that only grows."""
    return _declared(Metric(name, "counter", text, labels), default)


def gauge(name: str, text: str, *labels: str, **default: Any) -> Any:
    """Declare a number that may grow and shrink."""
    return _declared(Metric(name, "gauge", text, labels), default)


def histogram(name: str, text: str, **default: Any) -> Any:
    """Declare how many values were at most each bound. The field is a `telemetry.counts.Distribution`."""
    return field(metadata={"metric": Metric(name, "histogram", text)}, **default)


def _declared(metric: Metric, default: dict[str, Any]) -> Any:
    usual: dict[str, Any] = (
        {"default_factory": partial(defaultdict, float)} if metric.labels else {"default": 0}
    )
    return field(metadata={"metric": metric}, **(default or usual))
