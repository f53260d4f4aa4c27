"""Turns measurements into work for the cost model: pools the runs of the same cells, and gives one line for
each cell and system. The command calls this module.

`python -m bench.tiers --merge FILE ... --cells FILE` makes the lines that tests check the model against
(tests/unit/model_server/tiers/real_disk_cells.json).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.tiers.shapes import SHAPES
from bench.tiers.systems import CHUNK, RECOMPUTE, SYSTEMS

Row = dict[str, Any]
_CELL = ("shape", "layers", "prompts", "disk", "prefix_tokens", "ratio", "gpu_share", "cpu_share", "system")
_MEANS = ("bytes", "reads", "wanted_chunks", "chosen_tokens")


def pooled(rows: Sequence[Row]) -> list[Row]:
    """Pool the runs of one cell and system into one row, over the requests of all these runs."""
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault(tuple(row[name] for name in _CELL), []).append(row)
    return [_one(alike) if len(alike) > 1 else alike[0] for alike in runs.values()]


def _one(alike: Sequence[Row]) -> Row:
    weights = [row["requests"] for row in alike]
    together = {name: fmean([row[name] for row in alike], weights) for name in _MEANS}
    times = [seconds for row in alike for seconds in row["all_ttft_s"]]
    return {
        **alike[0],
        **together,
        "requests": sum(weights),
        "ttft_s": median(times) if times else None,
        "ttft_mean_s": fmean(times) if times else None,
        "all_ttft_s": times,
        "all_bytes": [number for row in alike for number in row["all_bytes"]],
    }


def write_cells(path: Path, rows: Sequence[Row], *, new_tokens: int) -> None:
    cells = [_cell(row, new_tokens=new_tokens) for row in rows if row["ttft_mean_s"] is not None]
    lines = ",\n".join(json.dumps(list(cell.values())) for cell in cells)
    columns = json.dumps(list(cells[0]) if cells else [])
    path.write_text(f'{{"columns": {columns}, "cells": [\n{lines}\n]}}\n')


def _cell(row: Row, *, new_tokens: int) -> Row:
    """Return the fields of the cost model's `Work`, where the bytes come from, and the measured seconds."""
    recompute = row["system"] == RECOMPUTE.name
    return {
        "shape": row["shape"],
        "prefix_tokens": row["prefix_tokens"],
        "ratio": row["ratio"],
        "gpu_share": row["gpu_share"],
        "system": row["system"],
        "layers": row["layers"],
        "layer_weights": SHAPES[row["shape"]].layer_weights,
        "computed_tokens": new_tokens + (row["prefix_tokens"] if recompute else 0),
        "disk_bytes": round(row["bytes"]),
        "reads": round(row["reads"], 1),
        "used_bytes": round(_used_bytes(row)),
        "seconds": round(row["ttft_mean_s"], 4),
    }


def _used_bytes(row: Row) -> float:
    """Return the bytes of chunks and probed keys that a request needed, wherever they were found."""
    [system] = [system for system in SYSTEMS if system.name == row["system"]]
    if system is RECOMPUTE:
        return 0.0
    shape = SHAPES[row["shape"]]
    probed = system.probe_heads(shape.heads)
    record = 2 * shape.head_dim
    chunks = row["wanted_chunks"] * CHUNK * (2 * shape.heads - probed) * record
    return float(chunks + row["layers"] * row["prefix_tokens"] * probed * record)
