"""The metrics reference page, made from the same list that registers the metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from epp.telemetry import catalog
from epp.telemetry.catalog import Spec

_INTRO: Final = """\
# Metrics

Served at `/metrics` on the admin address, in Prometheus's text format. Each worker process has its own.
Beside these stand `process_*`: CPU seconds, memory, open files and start time of the process.
"""


def metrics_reference() -> str:
    """The page, in Markdown."""
    return "\n".join(
        [
            _INTRO,
            *_section("Counted as things happen", catalog.EVENTS),
            *_section("State, read when Prometheus asks", catalog.STATE),
        ]
    )


def _section(title: str, specs: Iterable[Spec]) -> list[str]:
    rows = [
        f"| `{spec.name}` | {spec.kind} | {', '.join(f'`{label}`' for label in spec.labels) or '-'} | {spec.help} |"
        for spec in specs
    ]
    return [f"## {title}\n", "| name | type | labels | meaning |", "| --- | --- | --- | --- |", *rows, ""]
