"""The cost model, compared with the measured cells of docs/tiers.md, and what a server learns of its own
speeds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from model_server.tiers.cost import Load, Machine, Speeds, Work

_SLOW_MOTION = 50
_MACHINE = Machine(
    flops_per_s=150e12 / _SLOW_MOTION,
    weights_bytes_per_s=1.5e12 / _SLOW_MOTION,
    disk_bytes_per_s=5e9 / _SLOW_MOTION,
    read_s=100e-6,
)
"""The disk and accelerator of the page."""
_OWN_S = 0.03
"""The time of our own work in each request, as on the page."""
_LAYERS, _WEIGHTS, _NEW = 6, 12 * 7168**2, 24
_BYTES = {
    (256, "25%", "1+2"): ((82, 178), (77, 173), (35, 84), (29, 68), (21, 46)),
    (256, "25%", "5+10"): ((57, 123), (52, 117), (19, 44), (12, 28), (8, 17)),
    (256, "25%", "10+30"): ((29, 63), (27, 60), (5, 12), (1, 2), (0, 1)),
    (512, "25%", "1+2"): ((163, 356), (150, 321), (69, 155), (55, 123), (37, 80)),
    (512, "25%", "5+10"): ((113, 246), (100, 213), (39, 88), (25, 57), (13, 27)),
    (512, "25%", "10+30"): ((58, 127), (52, 112), (14, 30), (4, 9), (0, 1)),
}
"""MB and number of reads of 12 layers for a request, by system: everything, top-k, the document's rules, few
chunks, sinks + window."""
_BY_MEANS = {
    (256, "25%", "1+2"): (1.34, 0.68, 1.37, 0.69),
    (256, "25%", "5+10"): (1.37, 0.78, 1.37, 0.78),
    (256, "25%", "10+30"): (0.98, 0.77, 1.06, 0.84),
    (512, "25%", "1+2"): (1.89, 0.60, 2.12, 0.68),
    (512, "25%", "5+10"): (1.85, 0.68, 2.15, 0.79),
    (512, "25%", "10+30"): (1.20, 0.73, 1.38, 0.84),
}
"""Means measured with 30B. The first two numbers are the times of the strongest baseline and of sinks +
window, divided by the time of the document's rules. The last two are the same, divided by that of few chunks.
"""


def seconds(tokens: int, mb_and_reads: tuple[float, float] = (0, 0)) -> float:
    mb, reads = mb_and_reads
    work = Work(
        computed_tokens=tokens,
        layers=_LAYERS,
        layer_weights=_WEIGHTS,
        disk_bytes=mb * 1e6 / 2,
        reads=reads / 2,
    )
    return work.seconds(_MACHINE) + _OWN_S


@pytest.mark.parametrize("cell", _BYTES)
def test_the_model_is_right_within_a_third_with_small_tiers_and_says_which_system_is_faster(
    cell: tuple[int, str, str],
) -> None:
    """With tiers of 10 + 30 % hardly anything is read from disk. Our own work then decides, and the model
    is wrong by up to 40 %.
    """
    everything, top_k, document, few, window = (seconds(_NEW, read) for read in _BYTES[cell])
    strongest = min(seconds(cell[0] + _NEW), everything, top_k)
    expected = (strongest / document, window / document, strongest / few, window / few)
    measured = _BY_MEANS[cell]
    print(f"\n{cell}: " + ", ".join(f"{e:.2f} ({m:.2f})" for e, m in zip(expected, measured, strict=True)))
    small_tiers = cell[2] != "10+30"
    assert expected == pytest.approx(measured, rel=1 / 3 if small_tiers else 0.45)
    if small_tiers:
        assert [one > 1 for one in expected] == [one > 1 for one in measured]


def test_recompute_takes_the_measured_time() -> None:
    assert seconds(512 + _NEW) == pytest.approx(1.32, abs=0.05)
    assert seconds(256 + _NEW) == pytest.approx(0.70, abs=0.05)


def test_a_disk_that_is_slower_than_the_accelerator_makes_recompute_the_fastest() -> None:
    slow = Machine(flops_per_s=150e12, weights_bytes_per_s=1.5e12, disk_bytes_per_s=0.4e9)
    recompute = Work(computed_tokens=536, layers=4, layer_weights=_WEIGHTS)
    load = Work(computed_tokens=24, layers=4, layer_weights=_WEIGHTS, disk_bytes=59e6)
    assert recompute.seconds(slow) < load.seconds(slow)
    weak = Machine(flops_per_s=10e12, weights_bytes_per_s=250e9, disk_bytes_per_s=0.4e9)
    assert recompute.seconds(weak) > load.seconds(weak)


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """A system on this project's machine with its real disk: the work that it had to do, and the mean of
    the measured seconds.
    """

    shape: str
    tiers: float
    """The share of all KV that the first tier holds."""
    case: tuple[Any, ...]
    """The values that the systems of one comparison have in common."""
    system: str
    work: Work
    seconds: float

    def on(self, machine: Machine) -> float:
        """Return the measured seconds, with the computation of another accelerator in place of the
        simulated one.
        """
        computed = replace(self.work, disk_bytes=0.0, reads=0.0, used_bytes=0.0)
        return self.seconds - computed.seconds(_REAL) + computed.seconds(machine)


_REAL = Machine(
    flops_per_s=10e12,
    weights_bytes_per_s=250e9,
    disk_bytes_per_s=0.8e9,
    read_s=300e-6,
    copied_bytes_per_s=0.8e9,
)
"""The benchmark imposes the speed of this accelerator. Disk and copy have the speeds that fit 30B best."""
_CELLS = Path(__file__).with_name("real_disk_cells.json")


def real_cells() -> list[MeasuredCell]:
    content = json.loads(_CELLS.read_text())
    found = []
    for values in content["cells"]:
        told = dict(zip(content["columns"], values, strict=True))
        names = ("computed_tokens", "layers", "layer_weights", "disk_bytes", "reads", "used_bytes")
        case = tuple(told[name] for name in ("shape", "prefix_tokens", "ratio", "gpu_share"))
        work = Work(**{name: told[name] for name in names})
        found.append(
            MeasuredCell(
                told["shape"], told["gpu_share"], case, told["system"], work, seconds=told["seconds"]
            )
        )
    return found


def cases(*systems: str) -> list[list[MeasuredCell]]:
    found: defaultdict[tuple[Any, ...], list[MeasuredCell]] = defaultdict(list)
    for cell in real_cells():
        if cell.system in systems:
            found[cell.case].append(cell)
    return list(found.values())


def test_on_a_real_disk_the_median_cell_is_predicted_within_a_quarter_for_large_and_small_tiers() -> None:
    """288 cells of 8 systems: OPT-30B and 13B, 256 to 1,024 tokens, on a crowded machine, where single
    cells are inaccurate.
    """
    ratios: defaultdict[tuple[str, float], list[float]] = defaultdict(list)
    without_copy: defaultdict[float, list[float]] = defaultdict(list)
    disk_alone = replace(_REAL, copied_bytes_per_s=1e30)
    cells = real_cells()
    assert len(cells) == 288
    for cell in cells:
        if cell.system != "recompute":
            ratios[cell.shape, cell.tiers].append(cell.work.seconds(_REAL) / cell.seconds)
            without_copy[cell.tiers].append(cell.work.seconds(disk_alone) / cell.seconds)
    assert len(ratios) == 6
    for group, found in ratios.items():
        near = fmean(2 / 3 <= ratio <= 4 / 3 for ratio in found)
        print(f"\n{group}: {len(found)} cells, median {median(found):.2f}, within a third {near:.0%}")
        assert 0.8 <= median(found) <= 1.25
        assert near >= 0.55
        assert fmean(0.5 <= ratio <= 2 for ratio in found) >= 0.88
    assert median(without_copy[0.1]) < 0.7, "the content of large tiers has to be copied too"


def test_002_5_the_mean_gain_on_the_recorded_disk_reaches_the_documents_factor_in_1_of_36_cells() -> None:
    """The strongest of three systems (recompute, loading everything, top-k) is divided by the document's
    rules, and by few chunks.
    """
    baselines = ("recompute", "load everything + LFU", "top-k of all heads + LFU")
    document, few, window = "+ importance caching", "+ few chunks", "sinks + window + LFU"
    gains: defaultdict[str, list[float]] = defaultdict(list)
    for case in cases(*baselines, document, few, window):
        taken = {cell.system: cell.seconds for cell in case}
        strongest = min(taken[name] for name in baselines)
        for name in (document, few):
            gains[name].append(strongest / taken[name])
        assert taken[window] == min(taken.values()), "its answers are worse: docs/tiers.md"
    assert {name: len(found) for name, found in gains.items()} == {document: 36, few: 36}
    assert [gain for gain in gains[document] if gain >= 2.0] == [pytest.approx(2.02, abs=0.01)]
    assert sum(round(gain, 1) >= 2.0 for gain in gains[few]) == 2


@pytest.mark.parametrize(("tflops", "right"), [(10, 28), (30, 36), (150, 36)])
def test_the_model_chooses_between_loading_and_computing_and_its_errors_cost_little(
    tflops: int, right: int
) -> None:
    """36 cases of the two ways between which `--kv-store-mode auto` chooses."""
    machine = replace(_REAL, flops_per_s=tflops * 1e12, weights_bytes_per_s=tflops * 25e9)
    lost, agreed = [], 0
    for both in cases("recompute", "load everything + LFU"):
        chosen = min(both, key=lambda cell: cell.work.seconds(machine))
        best = min(both, key=lambda cell: cell.on(machine))
        agreed += chosen is best
        lost.append(chosen.on(machine) / best.on(machine))
    print(f"\n{tflops} TFLOP/s: right in {agreed} of {len(lost)}, {fmean(lost) - 1:.1%} lost on the average")
    assert len(lost) == 36
    assert agreed >= right
    assert fmean(lost) <= 1.07


DISK = Load(disk_bytes=1000)
HELD = Load(disk_bytes=0, held_bytes=1000)


def test_a_server_loads_until_it_knows_both_speeds_and_then_takes_the_faster() -> None:
    speeds = Speeds()
    assert speeds.loading_is_faster(DISK, tokens=100)
    speeds.loaded(DISK, seconds=2.0)
    assert speeds.loading_is_faster(DISK, tokens=100), "the server's speed of computing is not known"
    speeds.computed(tokens=3, seconds=9.0)
    assert speeds.loading_is_faster(DISK, tokens=100), "so few tokens give no speed"
    speeds.computed(tokens=100, seconds=1.0)
    assert not speeds.loading_is_faster(DISK, tokens=100)
    assert speeds.loading_is_faster(DISK, tokens=300)
    tried = [speeds.loading_is_faster(DISK, tokens=100) for _ in range(34)]
    assert tried.count(True) == 2, "from time to time it tries the store again"
    for _ in range(20):
        speeds.loaded(DISK, seconds=0.1)
    assert speeds.loading_is_faster(DISK, tokens=100)


def test_a_prefix_in_the_fast_tiers_is_loaded_while_the_same_prefix_on_disk_is_computed() -> None:
    speeds = Speeds()
    speeds.computed(tokens=100, seconds=1.0)
    speeds.loaded(DISK, seconds=2.0)
    assert speeds.loading_is_faster(HELD, tokens=100), "the speed of the tiers is not known"
    speeds.loaded(HELD, seconds=0.1)
    for _ in range(5):
        assert not speeds.loading_is_faster(DISK, tokens=100)
        assert speeds.loading_is_faster(HELD, tokens=100), "the tiers are not slow because the disk is"
    half = Load(disk_bytes=450, held_bytes=550)  # 0.9 s and 0.055 s
    assert speeds.loading_is_faster(half, tokens=100)
    more = Load(disk_bytes=550, held_bytes=450)  # 1.1 s and 0.045 s
    assert not speeds.loading_is_faster(more, tokens=100)


def test_the_time_of_a_mixed_load_counts_for_the_place_with_most_of_its_bytes() -> None:
    speeds = Speeds()
    speeds.computed(tokens=100, seconds=1.0)
    speeds.loaded(HELD, seconds=0.2)
    speeds.loaded(Load(disk_bytes=500, held_bytes=500), seconds=0.6)  # the tiers took 0.1 of these 0.6 s
    assert speeds.loading_is_faster(Load(disk_bytes=900), tokens=100)
    assert not speeds.loading_is_faster(Load(disk_bytes=1100), tokens=100)
