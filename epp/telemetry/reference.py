"""The metrics reference page. It is made from the same declarations as the pages for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from epp.metric import Metric
from epp.telemetry.catalog import GROUPS

_INTRO: Final = """\
# Metrics

The picker serves these metrics at `/metrics` on the admin address, in the text format of Prometheus. Each
worker process has a page of its own. Each page also has the metrics `process_*`: CPU seconds, memory, open
files and start time of the process.
"""


def metrics_reference() -> str:
    sections = (_section(group.title, (metric for _, metric in group.metrics())) for group in GROUPS)
    return "\n".join([_INTRO, *(line for section in sections for line in section)])


def _section(title: str, metrics: Iterable[Metric]) -> list[str]:
    rows = [
        f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels) or '-'} | {m.help} |"
        for m in metrics
    ]
    return [f"## {title}\n", "| name | type | labels | meaning |", "| --- | --- | --- | --- |", *rows, ""]
