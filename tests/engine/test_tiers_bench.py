"""Row 002-3 on a real model's choices, row 002-5 in bytes, and the parts of the benchmark on large shapes:
systems, disks, computing, the report.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.tiers import __main__ as bench
from bench.tiers import bench_accuracy, report
from bench.tiers.disks import DirectDisk
from bench.tiers.patterns import PROBED_HEADS, Patterns, Recipe, record
from bench.tiers.shapes import SHAPES, ImposedCompute, RealCompute
from bench.tiers.systems import COUNTED, EVERYTHING, FEW_CHUNKS, OURS, PACKED, PROBED, SYSTEMS, TOP_K
from model_server.tiers.disk import RateLimitedDisk
from model_server.tiers.layout import TokenOrder
from model_server.tiers.selection import choose
from model_server.tiers.settings import EVERY_CHUNK, SelectionSettings


def test_002_3_chunk_reads_fall_at_least_twice_at_a_quarter_kept_on_a_real_model() -> None:
    """Half of a prefix's requests decide the order, and the others read. One run has the defaults, and one
    run has only the document's rule.
    """
    recorded = record(
        Recipe(kind="few-shot", prefix_tokens=256, prefixes=1, requests=12, new_tokens=24),
        progress=lambda _: None,
    )
    heads = recorded.heads[0].float()
    every = range(recorded.num_layers)
    before = after = few = 0
    for layer in every:
        learned = heads[:6, layer].mean((0, 1))
        packed = torch.tensor(TokenOrder.by_importance(learned.tolist()).slots) // 16
        for request in heads[6:, layer]:
            settings = SelectionSettings(ratio=0.25)
            by_few, tokens = (
                torch.arange(256) if choice.tokens is None else choice.tokens
                for choice in (
                    choose(request, settings=settings, chunks=packed),
                    choose(request, settings=replace(settings, chunk_share=EVERY_CHUNK), chunks=packed),
                )
            )
            before += len((tokens // 16).unique())
            after += len(packed[tokens].unique())
            few += len(packed[by_few].unique())
    assert before >= 2 * few
    assert before >= 1.5 * after, "by the document's rule"


@pytest.fixture
def made_up() -> Patterns:
    """Make two prefixes of 64 tokens. Their requests look at nearly the same quarter of the tokens."""
    generator = torch.Generator().manual_seed(4)
    shared = torch.rand(2, 1, 4, 1, 64, generator=generator) ** 12
    heads = shared + 0.02 * torch.rand(2, 6, 4, PROBED_HEADS, 64, generator=generator)
    heads = 64 * heads / heads.sum(-1, keepdim=True)
    return Patterns(heads.half(), heads.mean(3).half())


def rows_of(patterns: Patterns, arguments: list[str]) -> list[dict[str, Any]]:
    args = bench.parser().parse_args(
        [
            "--shape",
            "tiny",
            "--ratios",
            "0.25",
            "--tiers",
            "5+10",
            "--requests",
            "4",
            "--warm-up",
            "4",
            *arguments,
        ]
    )
    return [row for found in bench.measured(SHAPES["tiny"], patterns, args) for row in found]


@pytest.mark.parametrize("disk", ["direct", "limited", "counted"])
def test_each_system_serves_prefixes_from_each_disk(
    made_up: Patterns, disk: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--disk", disk, "--folder", str(tmp_path), "--slow-motion", "1", "--read-us", "1"]
    rows = rows_of(made_up, arguments)
    assert [row["system"] for row in rows] == [s.name for s in (COUNTED if disk == "counted" else SYSTEMS)]
    by_name = {row["system"]: row for row in rows}
    assert by_name[PACKED.name]["wanted_chunks"] < by_name[PROBED.name]["wanted_chunks"]
    assert by_name[PACKED.name]["chosen_tokens"] == by_name[PROBED.name]["chosen_tokens"]
    assert all((row["ttft_s"] is None) == (disk == "counted") for row in rows)
    report.print_tables(rows)
    assert OURS.name in capsys.readouterr().out
    picture = ET.fromstring(report.svg(rows))
    assert len(list(picture.iter())) > 10
    assert list(tmp_path.iterdir()) == [], "nothing stays on the disk"


def test_002_5_with_small_tiers_less_than_half_of_the_strongest_rivals_bytes_are_read(
    made_up: Patterns, tmp_path: Path
) -> None:
    """The strongest rival is the document's system: importance of all heads, and LFU. Times need a disk, so
    `make bench-tiers` measures them (docs/tiers.md).
    """
    rows = rows_of(made_up, ["--disk", "counted", "--folder", str(tmp_path)])
    read = {row["system"]: row["bytes"] for row in rows}
    assert read[TOP_K.name] >= 2 * read[OURS.name], "the document's three techniques"
    assert read[TOP_K.name] >= 2 * read[FEW_CHUNKS.name], "the default"
    assert read[EVERYTHING.name] >= 2 * read[FEW_CHUNKS.name]


def test_thin_records_count_the_same_bytes_as_wide_ones(made_up: Patterns, tmp_path: Path) -> None:
    """The bench uses thin records and multiplies their bytes. Each tier holds a share of all bytes, so the
    same chunks are in the same tiers.
    """
    wide, thin = (
        {
            row["system"]: row["bytes"]
            for row in rows_of(made_up, ["--disk", disk, "--layers", "4", "--folder", str(tmp_path)])
        }
        for disk in ("direct", "counted")
    )
    assert {name: thin[name] for name in wide if name != "recompute"} == {
        name: value for name, value in wide.items() if name != "recompute"
    }


def test_real_multiplications_take_what_the_tiers_give(made_up: Patterns, tmp_path: Path) -> None:
    rows = rows_of(made_up, ["--real-compute", "--folder", str(tmp_path)])
    assert all(row["ttft_s"] > 0 for row in rows)


def test_a_layer_of_random_weights_attends_to_a_prefix() -> None:
    shape = SHAPES["tiny"]
    compute = RealCompute(shape, device=torch.device("cpu"), dtype=torch.float32)
    keys = torch.zeros(5, shape.heads, shape.head_dim, dtype=torch.float16)
    compute.look(3, keys[:, :PROBED_HEADS])
    compute.layer(3, keys, keys)
    compute.layer(8, None, None)
    compute.finish()


def test_a_direct_disk_gives_the_bytes_of_any_range(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = bytes(range(256)) * 64
    path.write_bytes(content)
    direct = DirectDisk()
    with path.open("rb") as file:
        for offset, num_bytes in ((0, 1), (1, 5000), (4095, 2), (8192, 4096), (16000, 384), (16000, 9000)):
            found = direct.read(file.fileno(), offset=offset, num_bytes=num_bytes)
            assert found == content[offset : offset + num_bytes]
    assert direct.counts.reads == 6
    direct.close()


def test_slow_motion_slows_the_disk_and_the_accelerator_alike() -> None:
    args = bench.parser().parse_args(["--disk", "limited", "--slow-motion", "10"])
    disk, compute = bench.disk_of(args), bench.compute_of(SHAPES["opt-13b"], args)
    assert isinstance(disk, RateLimitedDisk)
    assert isinstance(compute, ImposedCompute)
    assert disk.bytes_per_s == 5e8
    assert compute.per_token_s == pytest.approx(10 * 2 * SHAPES["opt-13b"].layer_weights / 150e12)


def test_a_folder_that_refuses_direct_reads_is_named() -> None:
    with Path("/proc/self/status").open("rb") as file, pytest.raises(SystemExit, match="--folder"):
        DirectDisk().read(file.fileno(), offset=0, num_bytes=10)


def test_a_window_equals_a_choice_if_both_its_answers_and_its_likelihoods_are_as_good() -> None:
    def cell(same: float, kl: float) -> bench_accuracy.Measured:
        return bench_accuracy.Measured(same=[same], kl=[kl], nll=[1.0])

    found = {
        (0.25, bench_accuracy.PROBE): cell(0.9, 0.05),
        (0.5, bench_accuracy.PROBE): cell(0.99, 0.01),
        (0.25, bench_accuracy.SINKS): cell(0.8, 0.2),
        (0.8, bench_accuracy.SINKS): cell(0.95, 0.04),
        (0.5, bench_accuracy.SINKS): cell(0.91, 0.1),
    }
    assert bench_accuracy.equal_windows(found, bench_accuracy.PROBE) == [(0.25, 0.5, 0.8), (0.5, None, None)]
