"""Row 002-3 on a real model's choices, rows 002-5 and 002-6 in bytes, and the bench of large shapes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.tiers import __main__ as bench
from bench.tiers.patterns import PROBED_HEADS, Patterns, Recipe, record
from bench.tiers.shapes import SHAPES
from bench.tiers.systems import COUNTED, EVERYTHING, FEW_CHUNKS, OURS, PACKED, PROBED, SYSTEMS, TOP_K
from model_server.tiers.layout import TokenOrder
from model_server.tiers.selection import choose
from model_server.tiers.settings import EVERY_CHUNK, SelectionSettings


@pytest.mark.timeout(900)
def test_002_3_on_a_real_model_chunk_reads_halve_at_a_quarter_kept() -> None:
    """Half of a prefix's requests decide the order, and the others read, by the document's rule and by the
    default.
    """
    recorded = record(
        Recipe(prefix_tokens=256, prefixes=1, requests=12),
        progress=lambda _: None,
    )
    heads, settings = recorded.heads[0].float(), SelectionSettings(ratio=0.25)
    before = after = few = whole = 0
    for layer in range(recorded.num_layers):
        learned = heads[:6, layer].mean((0, 1))
        packed = torch.tensor(TokenOrder.by_importance(learned.tolist()).slots) // 16
        for request in heads[6:, layer]:
            by_few, by_rule = (
                choose(request, settings=replace(settings, chunk_share=share), chunks=packed).tokens
                for share in (settings.chunk_share, EVERY_CHUNK)
            )
            if by_few is None or by_rule is None:
                whole += 256 // 16  # the heads disagree, so the layer reads everything
                continue
            before += len((by_rule // 16).unique())
            after += len(packed[by_rule].unique())
            few += len(packed[by_few].unique())
    assert before >= 2 * after, "by the document's rule, where a quarter is kept"
    assert before + whole >= 2 * (few + whole), "by the default, in all layers"


@pytest.fixture
def made_up() -> Patterns:
    """Make two prefixes of 64 tokens. Their requests look at nearly the same quarter of the tokens."""
    generator = torch.Generator().manual_seed(4)
    shared = torch.rand(2, 1, 4, 1, 64, generator=generator) ** 12
    heads = shared + 0.02 * torch.rand(2, 6, 4, PROBED_HEADS, 64, generator=generator)
    heads = 64 * heads / heads.sum(-1, keepdim=True)
    return Patterns(heads.half(), heads.mean(3).half())


def rows_of(patterns: Patterns, disk: str, folder: Path) -> list[dict[str, Any]]:
    cell = ["--ratios", "0.25", "--tiers", "5+10", "--requests", "4", "--warm-up", "4"]
    real = ["--real-compute"] if disk == "direct" else []
    args = bench.parser().parse_args(
        ["--shape", "tiny", "--disk", disk, "--folder", str(folder), *cell, *real]
    )
    return [row for found in bench.measured(SHAPES["tiny"], patterns, args) for row in found]


@pytest.mark.parametrize(("disk", "systems"), [("direct", SYSTEMS), ("counted", COUNTED)])
def test_each_system_serves_prefixes_from_each_disk(
    made_up: Patterns, disk: str, systems: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(made_up, disk, tmp_path)
    assert [row["system"] for row in rows] == [system.name for system in systems]
    by_name = {row["system"]: row for row in rows}
    assert by_name[PACKED.name]["wanted_chunks"] < by_name[PROBED.name]["wanted_chunks"]
    assert by_name[PACKED.name]["chosen_tokens"] == by_name[PROBED.name]["chosen_tokens"]
    bench.print_tables(rows)
    assert OURS.name in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [], "nothing stays on the disk"


def test_002_5_and_002_6_reordering_halves_the_bytes_of_small_tiers(
    made_up: Patterns, tmp_path: Path
) -> None:
    """The strongest rival is the document's system: importance of all heads, and LFU. Times need a disk, so
    `make bench-tiers` measures them (docs/tiers.md).
    """
    read = {row["system"]: row["bytes"] for row in rows_of(made_up, "counted", tmp_path)}
    assert read[TOP_K.name] >= 2 * read[OURS.name], "the document's three techniques"
    assert read[TOP_K.name] >= 2 * read[FEW_CHUNKS.name], "the default"
    assert read[EVERYTHING.name] >= 2 * read[FEW_CHUNKS.name]
    saved = read[TOP_K.name] - read[OURS.name]
    assert read[PROBED.name] - read[PACKED.name] > 0.9 * saved, "002-6: the document has 30 and 8 %"
    assert read[OURS.name] == read[PACKED.name], "importance saves nothing; the document has 10 and 56 %"


def test_thin_records_count_the_same_bytes_as_wide_ones(made_up: Patterns, tmp_path: Path) -> None:
    """The bench uses thin records and multiplies their bytes. Each tier holds a share of all bytes, so the
    same chunks are in the same tiers.
    """
    wide, thin = (
        {row["system"]: row["bytes"] for row in rows_of(made_up, disk, tmp_path)}
        for disk in ("direct", "counted")
    )
    for system in SYSTEMS[1:]:
        assert thin[system.name] == wide[system.name]
