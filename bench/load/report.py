"""Makes the report of a run for people: lines for a terminal."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.load.figures import Figures, RunRecord


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table. `value` returns nan if there is no value to show."""

    name: str
    value: Callable[[Figures], float]
    show: Callable[[float], str]


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1000:,.{0 if seconds >= 0.1 else 1}f} ms"


def _count(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:,.0f}"


def _rate(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:,.2f}"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def _over(a: float, b: float) -> float:
    return a / b if b else math.nan


def _quantiles(title: str, measure: str, shares: Sequence[float]) -> list[Line]:
    def at(share: float) -> Callable[[Figures], float]:
        return lambda figures: figures.measures[measure].quantile(share)

    mean = Line(f"{title} mean", lambda figures: figures.measures[measure].mean, _ms)
    return [mean, *(Line(f"{title} p{share * 100:g}", at(share), _ms) for share in shares)]


LINES: Final[Sequence[Line]] = (
    Line("requests", lambda f: f.asked, _count),
    Line("answered", lambda f: f.answered, _count),
    Line("failed", lambda f: f.failed, _count),
    Line("not finished", lambda f: f.unfinished, _count),
    Line("answers/s", lambda f: _over(f.answered, f.duration_s), _rate),
    Line("output tokens/s, all together", lambda f: _over(f.output_tokens, f.duration_s), _count),
    Line("output tokens/s of one answer, p50", lambda f: f.measures["tokens_per_s"].quantile(0.5), _rate),
    *_quantiles("TTFT", "ttft_s", (0.5, 0.9, 0.99)),
    *_quantiles("inter-token", "inter_token_s", (0.5, 0.9)),
    *_quantiles("longest gap in an answer", "longest_gap_s", (0.9,)),
    *_quantiles("whole answer", "answer_s", (0.5, 0.9)),
    Line("prompt tokens", lambda f: f.prompt_tokens, _count),
    Line("prompt tokens from cache", lambda f: _over(f.cached_tokens, f.prompt_tokens), _percent),
)


def text(run: RunRecord) -> str:
    """Return the report: the table, failures by class, and the generator's verdict on itself."""
    rows = [(line.name, line.show(line.value(run.figures))) for line in LINES]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"  {name.ljust(widths[0])}  {value.rjust(widths[1])}" for name, value in rows]
    further = [*failure_lines(run.figures), *generator_lines(run.figures)]
    return "\n".join([*lines, "", f"{run.label}:", *(f"  {line}" for line in further)])


def failure_lines(figures: Figures) -> list[str]:
    found = []
    for kind, count in sorted(figures.failures.items()):
        example = figures.examples.get(kind, [kind])[0]
        found.append(f"{count} failed by class '{kind}', such as: {example}")
    if figures.uncounted:
        found.append(f"{figures.uncounted} answers came without usage: their tokens are counted as events")
    return found


def generator_lines(figures: Figures) -> list[str]:
    """Return the lines that say whether the generator was a bottleneck."""
    if figures.verdict:
        head = "THE GENERATOR WAS A BOTTLENECK: these figures are not the servers' alone."
        return [head, *(f"  - {reason}" for reason in figures.verdict), f"  ({figures.health.summary()})"]
    return [f"The generator kept up: {figures.health.summary()}."]
