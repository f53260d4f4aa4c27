"""Writes the results of a run: a table for people, and JUnit XML for CI. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal
from xml.etree import ElementTree as ET

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
    seconds: float = 0.0


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


def junit(results: Sequence[CheckResult]) -> str:
    """Return one test suite for each dialect."""
    root = ET.Element("testsuites", name="endpoint picker conformance")
    for dialect in dict.fromkeys(result.dialect for result in results):
        of = [result for result in results if result.dialect == dialect]
        suite = ET.SubElement(
            root,
            "testsuite",
            name=dialect,
            tests=str(len(of)),
            failures=str(sum(r.outcome == "fail" for r in of)),
            skipped=str(sum(r.outcome == "not asked" for r in of)),
            time=f"{sum(r.seconds for r in of):.3f}",
        )
        for result in of:
            case = ET.SubElement(
                suite,
                "testcase",
                classname=f"{dialect}.row{result.row:02}",
                name=result.claim,
                time=f"{result.seconds:.3f}",
            )
            if result.outcome == "fail":
                ET.SubElement(case, "failure", message=_printable(result.detail))
            elif result.outcome == "not asked":
                ET.SubElement(case, "skipped", message=_printable(result.detail))
    return ET.tostring(root, encoding="unicode", xml_declaration=True)


def _printable(text: str) -> str:
    """Return the text without control characters, which XML cannot contain."""
    return "".join(c if c.isprintable() else " " for c in text[:2000])
