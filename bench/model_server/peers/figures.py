"""Makes tables from turns: each engine with its cache and without, and all engines compared with ours. The
module is pure.

`Recorded` is the content of the JSON file: raw turns, so that several short runs make one table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from bench.model_server.peers.work import Round, Turn, answer_tokens, prompt_tokens
from bench.model_server.serving.client import RequestTimes, Run

Figures = dict[str, float | str]


@dataclass(slots=True)
class Recorded:
    """The turns of one row, by repeat and then by side."""

    prompt_tokens: int
    answer_tokens: int
    repeats: list[dict[str, Turn]] = field(default_factory=list)

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> Recorded:
        return cls(prompt_tokens(rounds), answer_tokens(rounds))

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Recorded:
        repeats = [{name: Turn(**turn) for name, turn in one.items()} for one in content["repeats"]]
        return cls(content["prompt_tokens"], content["answer_tokens"], repeats)


def whole_runs(row: Recorded, engines: Sequence[str]) -> list[Figures]:
    """Return one line for each engine, of rows that are timed as a whole."""
    return [_whole(row, engine) for engine in engines]


def first_tokens(row: Recorded, engines: Sequence[str]) -> list[Figures]:
    """Return one line for each engine, of a row of `FIRST_TOKENS`: the cache does not know the first rounds,
    but it knows the last rounds.
    """
    ours = [_new_and_seen(one["ours with"]) for one in row.repeats]
    lines: list[Figures] = []
    for engine in engines:
        cached = [_new_and_seen(one[f"{engine} with"]) for one in row.repeats]
        uncached = [sum(_new_and_seen(one[f"{engine} without"])) / 2 for one in row.repeats]
        new, seen = ([pair[n] for pair in cached] for n in (0, 1))
        lines.append(
            {
                "engine": engine,
                "CPU ms to the first token, new": 1e3 * median(new),
                "seen before": 1e3 * median(seen),
                "without the cache": 1e3 * median(uncached),
                **_ratios("new, times ours", new, [pair[0] for pair in ours]),
                **_ratios("seen before, times ours", seen, [pair[1] for pair in ours]),
                "tokens hit, seen before": median(_hits_seen(one[f"{engine} with"]) for one in row.repeats),
            }
        )
    return lines


def served(row: Recorded) -> list[Figures]:
    """Return one line for each side, of a row of `TIMED`: means over the repeats of their means and
    percentiles. Further lines have the figures with the cache divided by the figures without it, as means of
    the ratios within the repeats.
    """
    lines: list[Figures] = []
    for engine in dict.fromkeys(name.rpartition(" ")[0] for one in row.repeats for name in one):
        sides = {
            word: [_times(one[f"{engine} {word}"], row).row() for one in row.repeats]
            for word in ("with", "without")
        }
        for word, rows in sides.items():
            lines.append(
                {"engine": engine, "cache": word, **{name: fmean(r[name] for r in rows) for name in rows[0]}}
            )
        pairs = list(zip(sides["with"], sides["without"], strict=True))
        ratios = {name: fmean(a[name] / b[name] for a, b in pairs) for name in pairs[0][0] if name != "hits"}
        lines.append({"engine": engine, "cache": "with / without", "hits": "", **ratios})
    return lines


def _times(turn: Turn, row: Recorded) -> Run:
    """Return the times of the last round, in which requests arrive."""
    # all prompts have the same length
    tokens = row.prompt_tokens * len(turn.token_s) / (len(turn.token_s) + 1)
    served = [RequestTimes(times) for times in turn.token_s]
    return Run(served, turn.elapsed_s, round(tokens), turn.round_hit_tokens[-1] / tokens)


def same_answers(row: Recorded, side: str) -> float:
    """Return the share of the answers that equal, token for token, those of our engine without its cache."""
    pairs = [
        (a, b)
        for one in row.repeats
        for a, b in zip(one[side].answers, one["ours without"].answers, strict=True)
    ]
    return sum(list(a) == list(b) for a, b in pairs) / len(pairs)


def _whole(row: Recorded, engine: str) -> Figures:
    cached = [sum(one[f"{engine} with"].round_cpu_s) for one in row.repeats]
    uncached = [sum(one[f"{engine} without"].round_cpu_s) for one in row.repeats]
    return {
        "engine": engine,
        "CPU s with": median(cached),
        "without": median(uncached),
        **_ratios("times faster", uncached, cached),
        "answer tokens/s with": row.answer_tokens / median(cached),
        "without the cache": row.answer_tokens / median(uncached),
        **_ratios("tokens/s, times ours", [sum(one["ours with"].round_cpu_s) for one in row.repeats], cached),
        **_ratios(
            "without the cache, times ours",
            [sum(one["ours without"].round_cpu_s) for one in row.repeats],
            uncached,
        ),
        "hits": median(sum(one[f"{engine} with"].round_hit_tokens) for one in row.repeats)
        / row.prompt_tokens,
        "same answers": same_answers(row, f"{engine} with"),
    }


def _new_and_seen(turn: Turn) -> tuple[float, float]:
    """Return the mean CPU seconds of the rounds before the middle one, and of those after it."""
    middle = len(turn.round_cpu_s) // 2
    return fmean(turn.round_cpu_s[:middle]), fmean(turn.round_cpu_s[middle + 1 :])


def _hits_seen(turn: Turn) -> float:
    return fmean(turn.round_hit_tokens[len(turn.round_hit_tokens) // 2 + 1 :])


def _ratios(word: str, over: Sequence[float], under: Sequence[float]) -> Figures:
    """Return the median of the ratios within the repeats under `word`, and their mean and extremes under
    their own names.
    """
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return {
        word: median(ratios),
        f"{word}, mean": fmean(ratios),
        f"{word}, of the repeats": f"{min(ratios):.2f} to {max(ratios):.2f}",
    }
