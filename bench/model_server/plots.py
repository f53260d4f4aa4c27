"""Draws the pictures of docs/bench-caching.md from the files that the benchmarks wrote with --json.

`python -m bench.model_server.plots --hit-rates FILE --engine FILE --peers FILE` writes the pictures of each
given file to bench/model_server/figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.line_chart import Line, line_chart
from bench.model_server.peers import figures as peer_figures
from bench.model_server.peers.figures import Recorded
from bench.model_server.peers.work import ENGINES, FIRST_TOKENS, TIMED
from epp.replay.charts import Bars, bar_chart
from model_server.core.eviction import EVICTION_NAMES

FOLDER = Path(__file__).parent / "figures"
Content = Mapping[str, Any]
Pictures = dict[str, str]


def of_hit_rates(content: Content) -> Pictures:
    """Draw the pictures of bench_hit_rate: rows 000-5, the bound K, 000-8."""
    figure, policies = content["000-5"], content["000-8"]
    points = figure["points"]
    slope, intercept = figure["slope"], figure["intercept"]
    ends = (points[0][0], points[-1][0])
    return {
        "hit-rate": line_chart(
            f"000-5: hit rate against p, R² = {figure['r_squared']:.4f}",
            [
                Line("prompts found", [(p, rate) for p, rate, _ in points]),
                Line("prompt tokens found", [(p, rate) for p, _, rate in points]),
                Line("line through the first", [(p, slope * p + intercept) for p in ends], dashed=True),
            ],
            x_label="p, the share of prompts from the 20 frequent ones",
            y_label="share found",
        ),
        "hit-rate-by-k": line_chart(
            "000-5: prompts found against p, by K",
            [
                Line(f"K = {curve['K']:,}", [(p, rate) for p, rate, _ in curve["points"]])
                for curve in content["000-5 by K"]
            ],
            x_label="p, the share of prompts from the 20 frequent ones",
            y_label="share found",
        ),
        "bound": line_chart(
            "000: prompts found against the bound K, p = 0.8",
            [Line("", [(bound, rate) for bound, rate in content["000-bound"]])],
            x_label="K, blocks that keep content while no request holds them",
            y_label="share found",
            log_x=True,
        ),
        "policies": _policies("000-8: prefill saved, lasting favourites", policies["steady"]),
        "policies-drift": _policies("000-8: prefill saved, favourites that change", policies["drifting"]),
    }


def of_engine(content: Content) -> Pictures:
    """Draw the picture of bench-engine: the time of each row with the cache, as a share of the time
    without.
    """
    groups = []
    for row in content["rows"]:
        if row["row"] in ("000-figure-2", "001-7") or row["row"].endswith("-by-answer"):
            continue  # this row has its own picture and table
        for line in row["rows"]:
            label, share = _share(row["row"], line)
            groups.append(Bars(label, (1.0, share)))
    pictures = {}
    if groups:
        pictures["rows"] = bar_chart(
            "Time with the cache, as a share of the time without",
            ("without", "with"),
            groups,
            y_label="share of the time",
        )
    for row in content["rows"]:
        if row["row"] == "000-figure-2":
            sides = ("with", "without")
            pictures["items-by-p"] = line_chart(
                "000, figure 2: items/s against p",
                [Line(f"{s} the cache", [(x["p"], x[f"items/s {s}"]) for x in row["rows"]]) for s in sides],
                x_label="p, the share of prompts that are the same one",
                y_label="items/s",
            )
    by_answer = [row for row in content["rows"] if row["row"].endswith("-by-answer")]
    if by_answer:
        pictures["gain-by-answer"] = line_chart(
            "000: how much faster identical prompts are with the cache",
            [
                Line(
                    f"{_PROMPT[row['row']]}, {source}",
                    [(x["answer tokens"], x[key]) for x in row["rows"]],
                    dashed=key != "ratio",
                )
                for row in by_answer
                for key, source in (("ratio", "measured"), ("by the costs", "by the costs"))
            ],
            x_label="tokens answered",
            y_label="times as fast",
            log_x=True,
        )
    return pictures


def of_peers(content: Content) -> Pictures:
    """Draw the picture of bench-peers: CPU seconds of each engine, for the rows timed as a whole and for the
    rows timed to the first token.
    """
    rows = {name: Recorded.read(kept) for name, kept in content["rows"].items()}
    pictures = {}
    whole = [
        (name, peer_figures.whole_runs(row, ENGINES))
        for name, row in rows.items()
        if name not in (*FIRST_TOKENS, *TIMED)
    ]
    for name, lines in whole:
        pictures[f"peers-{name}"] = bar_chart(
            f"{name} against peers: CPU seconds, {content['layers'] or 30} layers",
            ("without the cache", "with the cache"),
            [Bars(str(x["engine"]), (_float(x["without"]), _float(x["CPU s with"]))) for x in lines],
            y_label="CPU s",
        )
    for name in rows.keys() & set(FIRST_TOKENS):
        lines = peer_figures.first_tokens(rows[name], ENGINES)
        columns = ("without the cache", "CPU ms to the first token, new", "seen before")
        which = "a prompt of 512, alone" if name == "alone" else "8 prompts of 512 at once"
        pictures[f"peers-first-token-{name}"] = bar_chart(
            f"First token of {which}: CPU ms, {content['layers'] or 30} layers",
            ("without the cache", "with, new to it", "with, seen before"),
            [Bars(str(x["engine"]), [_float(x[c]) for c in columns]) for x in lines],
            y_label="CPU ms",
        )
    return pictures


def _policies(title: str, rows: Sequence[Sequence[float]]) -> str:
    lines = [
        Line(name, [(row[0], row[column]) for row in rows], dashed=name == "last-touch")
        for column, name in enumerate(EVICTION_NAMES, start=1)
    ]
    return line_chart(title, lines, x_label="blocks in the cache", y_label="share of prefill tokens saved")


def _share(row: str, line: Content) -> tuple[str, float]:
    """Return a bar's label, and the time with the cache divided by the time without."""
    match row:
        case "000-7":
            return f"000-7 {line['p']:g}/{line['answer tokens']}", 1 / line["ratio"]
        case "001-6":
            return f"001-6, {line['cache']}", 1 / line["without / with"]
        case "001-8":
            return row, float(line["with / without"])
        case _:
            return f"{row} {line['mode']}", 1 / line["ratio"]


_PROMPT = {"000-7-by-answer": "prompts of 15 tokens", "000-6-by-answer": "of 5 tokens"}


def _float(value: float | str) -> float:
    assert isinstance(value, float | int)
    return float(value)


_MAKERS: dict[str, Callable[[Content], Pictures]] = {
    "hit_rates": of_hit_rates,
    "engine": of_engine,
    "peers": of_peers,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.model_server.plots", description=(__doc__ or "").partition("\n\n")[0]
    )
    for name in _MAKERS:
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            type=Path,
            metavar="FILE",
            help=f"file of the {name.replace('_', ' ')} benchmark",
        )
    args = vars(parser.parse_args())
    FOLDER.mkdir(exist_ok=True)
    for name, make in _MAKERS.items():
        if args[name] is None:
            continue
        for picture, text in make(json.loads(args[name].read_text())).items():
            target = FOLDER / f"{picture}.svg"
            target.write_text(text)
            print(target)


if __name__ == "__main__":
    main()
