"""Writes the results of a run as a table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from epp.config.dialects import DialectName

CheckOutcome = Literal["pass", "fail", "not asked"]
_WIDTH: Final = 76


@dataclass(frozen=True, slots=True)
class CheckResult:
    dialect: DialectName
    row: int
    claim: str
    outcome: CheckOutcome
    detail: str = ""
    """The error, or the reason why the check was not made."""


def table(results: Sequence[CheckResult]) -> str:
    """Return one line for each check, the details of the failures, and the totals."""
    lines = []
    for result in results:
        lines.append(f"{result.dialect:<14} row {result.row:>2}  {result.claim:<{_WIDTH}} {result.outcome}")
        if result.outcome == "fail":
            lines.append(f"{'':<14}         {result.detail}")
    counts = {
        outcome: sum(r.outcome == outcome for r in results) for outcome in ("pass", "fail", "not asked")
    }
    return "\n".join([*lines, ", ".join(f"{count} {outcome}" for outcome, count in counts.items())])
