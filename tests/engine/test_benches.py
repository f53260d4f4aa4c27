"""The bench of the caching documents' rows runs on tiny random models, and its rows have their figures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.model_server.engine import __main__ as command
from bench.model_server.engine import rows, runs, serving_row
from bench.model_server.engine.runs import BLOCK_TOKENS
from bench.model_server.engine.shapes import prompt_lengths


def test_a_second_run_of_the_engine_bench_adds_to_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    arguments = ["bench", "--shape", "tiny", "--rows", "001-8", "--repeats", "1", "--json", str(file)]
    monkeypatch.setattr("sys.argv", arguments)
    for expected in (2, 4):
        command.main()
        kept = json.loads(file.read_text())
        assert len(kept["series"]["001-8 with"]) == len(kept["series"]["001-8 without"]) == expected
    assert "random weights, shape tiny" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--shape", "8b", "--device", "cuda"])
    with pytest.raises(SystemExit):
        command.main()
    assert "torch sees no GPU here" in capsys.readouterr().err


def test_001_6_partial_blocks_find_all_but_the_last_token_of_a_prompt() -> None:
    bench = runs.prepare_shape("tiny", device_name="cpu", num_blocks=2048)
    full, partial = rows.prompts_twice(bench, runs.Kept({}), repeats=1, say=print)["rows"]
    assert full["hits of all prompt tokens"] == pytest.approx(0.49, abs=0.005)
    assert 0.49 < partial["hits of all prompt tokens"] < 0.5


@pytest.mark.parametrize("count", [rows.PROMPTS, rows.WHOLE_PROMPTS])
def test_001_6_prompts_of_peoples_lengths_hit_49_percent_in_full_blocks(count: int) -> None:
    lengths = prompt_lengths(count)
    assert len(lengths) == count
    assert min(lengths) >= 256
    assert max(lengths) <= 512
    assert max(lengths) - min(lengths) > 200
    blocks = sum((tokens - 1) // BLOCK_TOKENS for tokens in lengths)  # the last token is always computed
    assert blocks * BLOCK_TOKENS / (2 * sum(lengths)) == pytest.approx(0.49, abs=0.005)


def test_003_5_both_batched_modes_compute_each_distinct_prompt_once() -> None:
    """13 requests share 3 prompts, which is one in 4.33, as in the document."""
    bench = replace(runs.prepare_shape("tiny", device_name="cpu", num_blocks=1024), requests=13)
    found = rows.prompt_modes(bench, runs.Kept({}), repeats=1, say=print)
    assert [line["mode"] for line in found["rows"]] == ["naive", "offline", "online"]
    for line in found["rows"]:
        assert (line["prompts computed with"], line["prompts computed without"]) == (3, 13)
        assert line["throughput (total) with"] == line["answer tokens/s with"] * (856 + 16) / 16
        assert min(line["prefill s with"], line["prefill without"]) > 0
    assert found["same greedy text in all modes"]


def test_001_7_all_but_the_first_request_hit_37_5_percent() -> None:
    bench = replace(runs.prepare_shape("tiny", device_name="cpu", num_blocks=512), requests=6)
    on, off, ratios = serving_row.serving(bench, runs.Kept({}), repeats=1, say=print)["rows"]
    assert on["hits"] == pytest.approx(0.375 * 5 / 6)
    assert off["hits"] == 0
    for row in (on, off):
        assert 0 < row["TTFT ms"] <= row["TTFT P99"]
        assert row["TPOT ms"] > 0
    assert ratios["TTFT ms"] == on["TTFT ms"] / off["TTFT ms"]
