"""Turns measurements into tables.

Every figure is the median over rounds. Ratios are taken within a round. The number after ± is half the
distance between the quartiles. Pure functions of the results.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Final

from bench.dataplane.measure import CellResult, Results, Turn
from bench.dataplane.rig import VARIANTS, Process, Variant, VariantName
from bench.tables import markdown, percentile

TARGETS: Final = {(1, 1): 0.75, (1, 100): 0.7, (1, 1000): 0.7, (400, 1): 1.0}
"""The most that our picker may cost, as a multiple of the floor, by size of the prompt in KB and number of
chunks of the answer.
"""

TARGET_CHUNK_US: Final = 25.0
"""The most microseconds that a chunk may cost our picker in full duplex."""

TARGET_ADDED_MS: Final = 1.0
"""The most milliseconds to the first byte that Envoy and our picker may add at 1 KB, with one request at a
time.
"""

_HEADER: Final = (
    "prompt", "chunks", "way", "picker ms", "x floor", "Envoy ms", "messages", "TTFT p50", "p99", "added p50", "p99",
)  # fmt: skip

TARGET_ENDPOINTS: Final = 1.3
"""The most that a request of 1 KB may cost our picker with 1,000 endpoints, as a multiple of its
cost with 4.
"""

Row = Sequence[str]


def tables(results: Results) -> str:
    """Return all tables as Markdown."""
    parts = [_about_idle(results)]
    for title in dict.fromkeys(result.cell.table for result in results.cells):
        cells = [result for result in results.cells if result.cell.table == title]
        rows = [row for result in cells for row in _cell_rows(result)]
        parts.append(f"**{title}**\n\n{markdown(_HEADER, rows)}")
    if results.alone:
        header = ("prompt", "way", "TTFT p50", "p99", "added p50", "p99")
        rows = [row for kb, took in results.alone.items() for row in _alone_rows(kb, took)]
        parts.append(f"**One request at a time, milliseconds**\n\n{markdown(header, rows)}")
    verdicts = _verdicts(results)
    if verdicts:
        parts.append("**Against the targets**\n\n" + "\n".join(f"- {line}" for line in verdicts))
    return "\n\n".join(parts) + "\n"


def _about_idle(results: Results) -> str:
    lines = []
    for count, shares in results.idle_cores.items():
        used = ", ".join(f"{name} {shares[name] * 1000:.1f}" for name in ("ours", "floor", "envoy"))
        lines.append(
            f"Without requests, {count} endpoints, milliseconds of CPU a second: {used} (taken off below)."
        )
    return "\n".join(lines)


def _cell_rows(result: CellResult) -> Iterable[Row]:
    cell = result.cell
    direct = result.turns.get("direct")
    for name in cell.variants:
        variant, turns = VARIANTS[name], result.turns[name]
        ttft = _joined(turns)
        p50, p99 = percentile(ttft, 0.5) * 1000, percentile(ttft, 0.99) * 1000
        added = ("", "")
        if direct is not None and name != "direct":
            base = _joined(direct)
            added = (
                f"{p50 - percentile(base, 0.5) * 1000:.2f}",
                f"{p99 - percentile(base, 0.99) * 1000:.1f}",
            )
        yield (
            f"{cell.prompt_kb} KB",
            f"{cell.chunks:,}",
            variant.label,
            _each_ms(turns, variant.picker) if variant.picker else "",
            _ratio_text(result, variant),
            _each_ms(turns, "envoy") if name != "direct" else "",
            f"{result.messages[name]:.0f}" if variant.picker else "",
            f"{p50:.2f}",
            f"{p99:.1f}",
            *added,
        )


def _alone_rows(prompt_kb: int, took: dict[VariantName, list[float]]) -> Iterable[Row]:
    base50, base99 = (percentile(took["direct"], share) * 1000 for share in (0.5, 0.99))
    for name, seconds in took.items():
        p50, p99 = (percentile(seconds, share) * 1000 for share in (0.5, 0.99))
        added = ("", "") if name == "direct" else (f"{p50 - base50:.2f}", f"{p99 - base99:.2f}")
        yield (f"{prompt_kb} KB", VARIANTS[name].label, f"{p50:.2f}", f"{p99:.2f}", *added)


def _verdicts(results: Results) -> list[str]:
    """Return each target, and whether this run met it."""
    lines = []
    for result in results.cells:
        cell = result.cell
        ratios = _ratios(result, VARIANTS["ours"]) if "ours" in result.turns else []
        target = TARGETS.get((cell.prompt_kb, cell.chunks))
        if ratios and target is not None:
            ratio = statistics.median(ratios)
            what = f"{cell.table}: {cell.prompt_kb} KB prompts, {cell.chunks:,} chunks, cost x the floor"
            lines.append(f"{what}: {ratio:.2f}, target {target}: {_word(ratio, target)}")
    lines += [*_endpoints(results), *_duplex(results), *_added(results)]
    return lines


def _word(value: float, target: float) -> str:
    return "met" if value <= target else "MISSED"


def _endpoints(results: Results) -> Iterable[str]:
    """Return how much a request costs with many endpoints."""
    for result in results.cells:
        cell = result.cell
        if {"few", "ours"} <= result.turns.keys():
            pairs = zip(result.turns["ours"], result.turns["few"], strict=True)
            ratio = statistics.median(ours.each_ms("ours") / few.each_ms("few") for ours, few in pairs)
            what = f"{cell.table}: {cell.prompt_kb} KB prompts, {cell.chunks:,} chunks, cost x that with 4 endpoints"
            yield f"{what}: {ratio:.2f}, target {TARGET_ENDPOINTS}: {_word(ratio, TARGET_ENDPOINTS)}"


def _duplex(results: Results) -> Iterable[str]:
    """Return how much one more chunk costs in full duplex."""
    cells = [r for r in results.cells if "ours-duplex" in r.turns and r.cell.prompt_kb == 1]
    if len(cells) < 2:
        return
    few, many = min(cells, key=lambda r: r.cell.chunks), max(cells, key=lambda r: r.cell.chunks)
    more = many.cell.chunks - few.cell.chunks
    us = (
        1000 / more * (_median(many.turns["ours-duplex"], "ours") - _median(few.turns["ours-duplex"], "ours"))
    )
    verdict = f"target {TARGET_CHUNK_US:.0f}: {_word(us, TARGET_CHUNK_US)}"
    yield f"{VARIANTS['ours-duplex'].label}: {us:.0f} us of CPU a chunk, {verdict}"


def _added(results: Results) -> Iterable[str]:
    took = results.alone.get(1)
    if took is not None and {"ours", "direct"} <= took.keys():
        ms = (percentile(took["ours"], 0.5) - percentile(took["direct"], 0.5)) * 1000
        yield f"1 KB prompts one at a time, milliseconds added: {ms:.2f}, target {TARGET_ADDED_MS}: {_word(ms, TARGET_ADDED_MS)}"


def _ratios(result: CellResult, variant: Variant) -> list[float]:
    """Return the cost divided by the cost of the floor, round by round. Full duplex is compared with a
    floor of its own.
    """
    floor = result.turns.get("floor-duplex" if variant.duplex else "floor")
    if floor is None or variant.picker in (None, "floor"):
        return []
    turns = result.turns[variant.name]
    return [t.each_ms(variant.picker) / f.each_ms("floor") for t, f in zip(turns, floor, strict=True)]


def _ratio_text(result: CellResult, variant: Variant) -> str:
    ratios = _ratios(result, variant)
    return _spread(ratios) if ratios else ""


def _each_ms(turns: Sequence[Turn], process: Process) -> str:
    return _spread([turn.each_ms(process) for turn in turns])


def _median(turns: Sequence[Turn], process: Process) -> float:
    return statistics.median(turn.each_ms(process) for turn in turns)


def _spread(values: Sequence[float]) -> str:
    half = (percentile(values, 0.75) - percentile(values, 0.25)) / 2
    return f"{statistics.median(values):.2f} ±{half:.2f}"


def _joined(turns: Iterable[Turn]) -> list[float]:
    return [seconds for turn in turns for seconds in turn.first_bytes_s]
