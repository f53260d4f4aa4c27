"""The benchmarks that need torch run on tiny random models, and the engines that they compare do the same
work.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.model_server.engine import __main__ as command
from bench.model_server.engine import report_rows, rows, runs, schedulers
from bench.model_server.engine.runs import BLOCK_TOKENS
from bench.model_server.peers import figures, worker
from bench.model_server.peers.figures import Recorded
from bench.model_server.peers.first_layers import first_layers
from bench.model_server.peers.side_ours import Ours
from bench.model_server.peers.side_transformers import Transformers
from bench.model_server.peers.work import Round, arriving
from tests.engine.tiny_models import VOCABULARY, tiny


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    tiny("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def prompt(name: int, *, tokens: int) -> list[int]:
    return [3 + (name * 31 + n * n) % (VOCABULARY - 3) for n in range(tokens)]


@pytest.mark.parametrize("cache", [True, False])
def test_transformers_and_ours_find_and_answer_the_same(llama_folder: Path, *, cache: bool) -> None:
    prompts = [prompt(n, tokens=70 + 10 * n) for n in range(4)]
    rounds = [Round(prompts, 6), Round(prompts, 6), Round(prompts[:1], 1)]
    peer = Transformers(llama_folder, cache=cache, num_blocks=64)
    try:
        ours, theirs = (
            worker.run(side, rounds) for side in (Ours(llama_folder, cache=cache, num_blocks=64), peer)
        )
    finally:
        peer.close()
    assert ours.answers == theirs.answers
    assert list(ours.round_hit_tokens) == list(theirs.round_hit_tokens)
    assert (sum(ours.round_hit_tokens) > 0) is cache


def test_the_first_layers_of_a_model_compute_as_its_first_layers(llama_folder: Path, tmp_path: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(llama_folder)
    module.model.layers = module.model.layers[:2]
    cut = AutoModelForCausalLM.from_pretrained(first_layers(llama_folder, count=2, into=tmp_path / "cut"))
    tokens = torch.tensor([prompt(1, tokens=20)])
    with torch.inference_mode():
        assert torch.equal(cut(tokens, use_cache=False).logits, module(tokens, use_cache=False).logits)


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


def test_000_6_the_reports_question_is_found_each_time_and_is_8_percent_of_all_tokens_with_56_answered() -> (
    None
):
    """The report's 8.14 % follow from answers of 56.4 tokens."""
    bench = runs.prepare_shape("tiny", device_name="cpu", num_blocks=1024)
    told = report_rows.gain_by_answer(
        bench, runs.Kept({}), bench.question, (2, 56), repeats=1, say=print, row="000-6-by-answer"
    )
    assert [line["found of all tokens"] for line in told["rows"]] == pytest.approx([5 / 7, 5 / 61])


def test_001_6_partial_blocks_find_all_but_the_last_token_of_a_prompt() -> None:
    bench = runs.prepare_shape("tiny", device_name="cpu", num_blocks=2048)
    full, partial = rows.prompts_twice(bench, runs.Kept({}), repeats=1, say=print)["rows"]
    assert full["hits of all prompt tokens"] == pytest.approx(0.49, abs=0.005)
    assert 0.49 < partial["hits of all prompt tokens"] < 0.5


@pytest.mark.parametrize("count", [rows.PROMPTS, rows.WHOLE_PROMPTS])
def test_001_6_prompts_of_uneven_lengths_hit_49_percent_in_full_blocks(count: int) -> None:
    lengths = rows.uneven_lengths(count)
    assert len(lengths) == count
    assert min(lengths) >= 256
    assert max(lengths) <= 512
    assert max(lengths) - min(lengths) > 200
    blocks = sum((tokens - 1) // BLOCK_TOKENS for tokens in lengths)  # the last token is always computed
    assert blocks * BLOCK_TOKENS / (2 * sum(lengths)) == pytest.approx(0.49, abs=0.005)


def test_003_5_both_batched_modes_compute_each_distinct_prompt_once_and_answer_alike() -> None:
    """13 requests share 3 prompts, which is one in 4.33, as in the document."""
    bench = replace(runs.prepare_shape("tiny", device_name="cpu", num_blocks=1024), requests=13)
    told = rows.prompt_modes(bench, runs.Kept({}), repeats=1, say=print)
    assert [line["mode"] for line in told["rows"]] == ["naive", "offline", "online"]
    for line in told["rows"]:
        assert (line["prompts computed with"], line["prompts computed without"]) == (3, 13)
        assert line["throughput (total) with"] == line["answer tokens/s with"] * (856 + 16) / 16
    assert all("prefill ratio" in line for line in told["rows"][1:])
    assert told["same greedy text in all modes"]


def test_003_one_command_prints_the_three_modes_with_their_throughputs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--requests", "6", "--prompt-tokens", "40", "--distinct", "2", "--answer-tokens", "3"]
    monkeypatch.setattr("sys.argv", ["bench", "--shape", "tiny", *sizes])
    schedulers.main()
    told = capsys.readouterr().out
    assert [told.count(f"=== {mode} ===") for mode in runs.MODES] == [2, 2, 2]
    assert told.count("Throughput (total): ") == told.count("Throughput (completion): ") == 6
    assert told.count("Prompt tokens: 240\nCompletion tokens: 18\nTotal tokens: 258\n") == 6
    assert told.endswith("Same greedy text in all modes: True\n")


@pytest.mark.parametrize(("cache", "hits"), [(True, 0.375), (False, 0.0)])
def test_001_7_requests_that_come_at_moments_of_the_cpus_clock_hit_37_5_percent(
    llama_folder: Path, *, cache: bool, hits: float
) -> None:
    rounds = arriving(
        lambda name, tokens: prompt(sum(name.encode()), tokens=tokens),
        1,
        rate_per_s=50.0,
        shared_tokens=96,
        own_tokens=160,
        answer_tokens=5,
        requests=6,
    )
    row = Recorded.of(rounds)
    turns = {
        f"ours {word}": worker.run(Ours(llama_folder, cache=on, num_blocks=128), rounds)
        for word, on in (("with", cache), ("without", False))
    }
    row.repeats.append(turns)
    line, without, _ = figures.served(row)
    assert line["hits"] == pytest.approx(hits)
    assert without["hits"] == 0
    turn = turns["ours with"]
    assert turn.answers == turns["ours without"].answers
    assert [len(times) for times in turn.token_s] == [5] * 6
    assert all(0 < earlier <= later for times in turn.token_s for earlier, later in pairwise(times))
    assert turn.elapsed_s >= rounds[1].arrivals_s[-1]


def test_an_engine_that_cannot_be_given_requests_while_it_works_is_refused(llama_folder: Path) -> None:
    peer = Transformers(llama_folder, cache=True, num_blocks=64)
    try:
        with pytest.raises(TypeError, match="takes no requests while it works"):
            worker.run(peer, [Round([prompt(1, tokens=8)], 1, [0.0])])
    finally:
        peer.close()
