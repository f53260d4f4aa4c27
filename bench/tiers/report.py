"""Makes tables and a picture of the systems' times, from the rows of the JSON.

The benchmark on large shapes calls this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from bench.model_server import tables
from bench.tiers.systems import (
    EVERYTHING,
    FEW_CHUNKS,
    FEW_LFU,
    OURS,
    PACKED,
    PROBED,
    RECOMPUTE,
    STEPS,
    SYSTEMS,
    TOP_K,
    WINDOW,
)

Row = dict[str, Any]
_BASELINES = (RECOMPUTE.name, EVERYTHING.name, TOP_K.name)
_LEFT, _TOP, _WIDTH, _HEIGHT = 190, 180, 62, 22


def write_json(path: Path | None, rows: Sequence[Row]) -> None:
    tables.write_json(path, rows)


def print_tables(rows: Sequence[Row]) -> None:
    cells = by_cell(rows)
    timed = {cell: found for cell, found in cells.items() if found[OURS.name]["ttft_s"] is not None}
    for figure, name in (("ttft_s", "median"), ("ttft_mean_s", "mean")) if timed else ():
        tables.show(
            f"002-5: time to the first token, {name}, in s. The last two columns have the times of other systems, divided by "
            "the time of the document's rules and by the time with few chunks. The other systems are: the fastest of "
            "recompute, load everything and top-k; top-k; sinks + window",
            (*_COLUMNS, *(system.name for system in SYSTEMS), "document's rules", "few chunks"),
            [
                (
                    *cell,
                    *(f"{found[s.name][figure]:.3f}" if s.name in found else "" for s in SYSTEMS),
                    *(
                        ", ".join(f"{gain:.2f}x" for gain in gains(found, ours.name, figure))
                        for ours in (OURS, FEW_CHUNKS)
                    ),
                )
                for cell, found in timed.items()
            ],
        )
    names = [name for name in dict.fromkeys(row["system"] for row in rows) if name != RECOMPUTE.name]
    tables.show(
        "002-5: MB from disk (reads) a request",
        (*_COLUMNS, *names),
        [(*cell, *(_from_disk(found.get(name)) for name in names)) for cell, found in cells.items()],
    )
    tables.show(
        "002-3: chunks that a request needs, from disk and from the fast tiers",
        (*_COLUMNS, PROBED.name, PACKED.name, "times fewer", FEW_CHUNKS.name, "times fewer"),
        [
            (
                *cell,
                *(f"{found[PROBED.name]['wanted_chunks']:.0f}",),
                *(
                    text
                    for name in (PACKED.name, FEW_CHUNKS.name)
                    for text in (
                        f"{found[name]['wanted_chunks']:.0f}",
                        f"{found[PROBED.name]['wanted_chunks'] / found[name]['wanted_chunks']:.2f}x",
                    )
                ),
            )
            for cell, found in cells.items()
        ],
    )
    _print_steps(cells)


def _from_disk(row: Row | None) -> str:
    return f"{row['bytes'] / 1e6:.1f} ({row['reads']:.0f})" if row else ""


def _print_steps(cells: dict[tuple[str, ...], dict[str, Row]]) -> None:
    """Print for each technique what it saves, and its share of what the document's three techniques save
    together.
    """
    lines = []
    for cell, found in cells.items():
        for steps in STEPS:
            for figure, unit, name in (("bytes", 1e6, "MB from disk"), ("ttft_mean_s", 1.0, "mean s")):
                if steps[0].name in found and found[OURS.name][figure] is not None:
                    values = [found[step.name][figure] / unit for step in steps]
                    saved = values[0] - values[3]
                    savings = [
                        f"{one - other:.3f} ({(one - other) / saved:.0%})" for one, other in pairwise(values)
                    ]
                    lfu = "forgets" if steps[0].forgetful else "all uses"
                    late = (
                        f"{(found[FEW_LFU.name][figure] / unit - values[-1]):.3f}"
                        if FEW_LFU.name in found
                        else ""
                    )
                    lines.append((*cell, lfu, name, f"{values[0]:.3f}", *savings, f"{values[-1]:.3f}", late))
    tables.show(
        "002-6: what each technique saves when the techniques are switched on one by one (brackets: share of what the "
        "document's three techniques save together)",
        (
            *(*_COLUMNS, "LFU", "figure", TOP_K.name, *(step.name for step in STEPS[0][1:]), "remaining"),
            "importance caching after few chunks",
        ),
        lines,
    )


_COLUMNS = ("shape", "disk", "prompts", "prefix", "kept", "tiers")


def by_cell(rows: Sequence[Row]) -> dict[tuple[str, ...], dict[str, Row]]:
    cells: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        tiers = f"{row['gpu_share']:.0%} + {row['cpu_share']:.0%}"
        shape = f"{row['shape']}, {row['layers']} layers"
        cell = (shape, row["disk"], row["prompts"], str(row["prefix_tokens"]), f"{row['ratio']:.0%}", tiers)
        cells.setdefault(cell, {})[row["system"]] = row
    return cells


def gains(found: dict[str, Row], name: str, figure: str) -> tuple[float, ...]:
    """Return times divided by those of our rules: first for the fastest of recompute, load everything and
    top-k, then for top-k alone, then for sinks and window.
    """
    own = found[name][figure]
    return tuple(
        float(min(found[base][figure] for base in bases) / own)
        for bases in (_BASELINES, (TOP_K.name,), (WINDOW.name,))
    )


def svg(rows: Sequence[Row]) -> str:
    """Draw a field for each system and cell: the TTFT as a multiple of the TTFT of the document's rules.
    Green is faster.
    """
    cells = {c: found for c, found in by_cell(rows).items() if found[OURS.name]["ttft_s"] is not None}
    names = [system.name for system in SYSTEMS]
    width, height = max(720, _LEFT + _WIDTH * len(cells) + 150), _TOP + _HEIGHT * (len(names) + 1) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="10" y="20" font-size="13">mean TTFT divided by that of the document\'s three techniques together; last line: their mean TTFT in s</text>',
    ]
    for line, name in enumerate([*names, "seconds"]):
        parts.append(
            f'<text x="{_LEFT - 8}" y="{_TOP + _HEIGHT * line + 15}" text-anchor="end">{escape(name)}</text>'
        )
    for column, (cell, found) in enumerate(cells.items()):
        x = _LEFT + _WIDTH * column
        shape, disk = (part.split(",")[0] for part in cell[:2])
        label = f"{shape}, {disk} disk, {cell[3]} tokens, {cell[4]}, {cell[5]}"
        parts.append(f'<text transform="translate({x + 26},{_TOP - 6}) rotate(-35)">{escape(label)}</text>')
        ours = found[OURS.name]["ttft_mean_s"]
        for line, name in enumerate(names):
            if name in found:
                parts.append(_field(found[name]["ttft_mean_s"] / ours, x, _TOP + _HEIGHT * line))
        y = _TOP + _HEIGHT * len(names) + 15
        parts.append(f'<text x="{x + _WIDTH / 2 - 1:.0f}" y="{y}" text-anchor="middle">{ours:.3f}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _field(ratio: float, x: int, y: int) -> str:
    hue = max(0.0, min(120.0, 90 - 60 * (ratio - 1)))
    return (
        f'<rect x="{x}" y="{y}" width="{_WIDTH - 2}" height="{_HEIGHT - 2}" fill="hsl({hue:.0f},65%,72%)"/>'
        f'<text x="{x + _WIDTH / 2 - 1:.0f}" y="{y + 15}" text-anchor="middle">{ratio:.2f}</text>'
    )
