"""Tests the parts of the caching benchmarks: the requests to the peers, the figures from their turns, and the
pictures.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise

import pytest

from bench.line_chart import Line, line_chart
from bench.model_server import bench_partial, plots
from bench.model_server.engine import answer_costs, step_costs
from bench.model_server.peers import figures, work, worker
from bench.model_server.peers.figures import Recorded
from bench.model_server.peers.work import ENGINES, Prompt, Round, Turn
from epp.replay.charts import Bars, bar_chart
from model_server.core.engine import Engine, EngineConfig
from model_server.core.request import NO_TOKEN, Request, RequestId, TokenId
from model_server.runners.cost import CostModel, CostRunner

_SVG = "{http://www.w3.org/2000/svg}"


def text_of(name: str, tokens: int) -> Prompt:
    return [hash((name, n)) % 1000 for n in range(tokens)]


def turn(seconds: Sequence[float], *, hits: int = 0, answers: Sequence[Sequence[int]] = ((1,),)) -> Turn:
    return Turn(seconds, seconds, [hits] * len(seconds), answers)


def recorded(**seconds: Sequence[float]) -> Recorded:
    """Return one repeat: the seconds of each engine with the cache, and ten times as many without."""
    sides = {f"{engine} with": turn(s, hits=5) for engine, s in seconds.items()}
    sides |= {f"{engine} without": turn([10 * x for x in s]) for engine, s in seconds.items()}
    return Recorded(prompt_tokens=20, answer_tokens=6, repeats=[sides])


@pytest.mark.parametrize(("row", "hit_share"), [("001-6", 0.48), ("003-5", 0.75)])
def test_a_row_repeats_as_many_prompt_tokens_as_its_document_says(row: str, hit_share: float) -> None:
    seen: set[tuple[int, ...]] = set()
    again = total = 0
    for one in work.ROWS[row](text_of, 0):
        for prompt in one.prompts:
            # Only whole blocks are found, and one token is left to compute.
            again += (len(prompt) - 1) // work.BLOCK_TOKENS * work.BLOCK_TOKENS * (tuple(prompt) in seen)
            total += len(prompt)
            seen.add(tuple(prompt))
    assert again / total == pytest.approx(hit_share, abs=0.02)


def serve_twice(*, cache: bool) -> tuple[float, float]:
    """Serve row 001-6 by an engine over the cost model. Return the modelled seconds of the whole run, and
    hits as a share of all prompt tokens.
    """
    runner = CostRunner(CostModel(), max_loras=1, next_token=lambda _: TokenId(7))
    config = EngineConfig(
        num_blocks=4096, block_size_tokens=16, enable_prefix_caching=cache, eos_token_id=NO_TOKEN
    )
    engine = Engine(config, runner)
    seconds, hits, asked = 0.0, 0, 0
    for number, one in enumerate(work.ROWS["001-6"](text_of, 0)):
        requests = [
            Request(
                RequestId(f"{number} {n}"), [TokenId(t) for t in tokens], one.answer_tokens, arrival_s=0.0
            )
            for n, tokens in enumerate(one.prompts)
        ]
        for request in requests:
            engine.add(request)
        while engine.num_unfinished:
            seconds = engine.step(now=seconds)[1]
        hits += sum(request.num_cached_tokens or 0 for request in requests)
        asked += sum(request.num_prompt_tokens for request in requests)
    return seconds, hits / asked


def test_001_6_an_engine_hits_49_percent_and_its_modelled_run_is_at_least_1_6_times_as_fast() -> None:
    """Every second prompt is found except its last, unfinished block, which has about 8 of 384 tokens on
    average.
    """
    with_cache, hits = serve_twice(cache=True)
    without, none = serve_twice(cache=False)
    assert round(hits, 2) == 0.49
    assert none == 0
    assert without >= 1.6 * with_cache


def test_repeats_send_different_prompts() -> None:
    first, second = (work.ROWS["001-6"](text_of, repeat) for repeat in (0, 1))
    assert all(a != b for a, b in zip(first[0].prompts, second[0].prompts, strict=True))


class NotingSide:
    version = "1"

    def __init__(self, *, missing: int = 0) -> None:
        self.calls: list[str] = []
        self._missing = missing

    def forget(self) -> None:
        self.calls.append("forget")

    def answer(self, prompts: Sequence[Prompt], *, answer_tokens: int) -> tuple[list[list[int]], int]:
        self.calls.append("answer")
        return [[0] * (answer_tokens - self._missing) for _ in prompts], len(self.calls)


def test_a_turn_starts_with_an_empty_cache_and_keeps_each_round_apart() -> None:
    engine = NotingSide()
    done = worker.run(engine, [Round([[1, 2]], 3), Round([[1], [2]], 1)])
    assert engine.calls == ["forget", "answer", "answer"]
    assert list(done.round_hit_tokens) == [2, 3]
    assert list(done.answers) == [[0, 0, 0], [0], [0]]
    assert len(done.round_cpu_s) == len(done.round_wall_s) == 2


def test_an_engine_that_ends_answers_early_is_refused() -> None:
    with pytest.raises(RuntimeError, match="answers of"):
        worker.run(NotingSide(missing=1), [Round([[1, 2]], 3)])


def test_engines_are_compared_with_ours_within_a_repeat() -> None:
    row = recorded(ours=[1.0, 1.0], transformers=[4.0, 4.0], vllm=[0.5, 0.5])
    ours, transformers, vllm = figures.whole_runs(row, ENGINES)
    assert [x["tokens/s, times ours"] for x in (ours, transformers, vllm)] == [1.0, 0.25, 2.0]
    assert transformers["times faster"] == pytest.approx(10)
    assert vllm["answer tokens/s with"] == pytest.approx(6.0)
    assert vllm["hits"] == pytest.approx(0.5)


def test_first_tokens_of_new_and_of_seen_prompts_are_told_apart() -> None:
    row = recorded(ours=[0.4, 0.2, 9.0, 0.05, 0.03])
    [ours] = figures.first_tokens(row, ["ours"])
    assert ours["CPU ms to the first token, new"] == pytest.approx(300)
    assert ours["seen before"] == pytest.approx(40)


def test_answers_that_differ_from_ours_count() -> None:
    row = recorded(ours=[1.0])
    row.repeats[0]["vllm with"] = turn([1.0], answers=[[1], [2]])
    row.repeats[0]["ours without"] = turn([1.0], answers=[[1], [3]])
    assert figures.same_answers(row, "vllm with") == 0.5


def test_recorded_turns_that_are_read_back_are_equal() -> None:
    row = recorded(ours=[1.0, 2.0])
    assert Recorded.read(asdict(row)) == row


def test_bars_are_as_long_as_their_values() -> None:
    svg = ET.fromstring(bar_chart("title", ("a", "b"), [Bars("x", (1.0, 0.5)), Bars("y", (None, 0.25))], y_label="y"))  # fmt: skip
    heights = [float(rect.attrib["height"]) for rect in svg.iter(f"{_SVG}rect")][3:]
    assert heights == pytest.approx([heights[0], heights[0] / 2, heights[0] / 4], abs=0.2)


def test_equal_ratios_are_equally_far_apart_on_an_axis_of_ratios() -> None:
    text = line_chart("t", [Line("", [(1, 1), (10, 2), (100, 4)])], x_label="", y_label="", log_x=True)
    [line] = ET.fromstring(text).iter(f"{_SVG}polyline")
    places = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    first, second = (b[0] - a[0] for a, b in pairwise(places))
    assert first == pytest.approx(second, abs=0.2)
    assert places[0][1] > places[1][1] > places[2][1], "more is higher"


def test_pictures_are_made_from_the_files_of_the_benchmarks() -> None:
    whole = recorded(ours=[1.0, 1.0], transformers=[4.0, 4.0], vllm=[0.5, 0.5])
    alone = recorded(**{engine: [0.4, 9.0, 0.1] for engine in ENGINES})
    content = {
        "layers": 0,
        "rows": {"001-6": asdict(whole), "alone": asdict(alone), "together": asdict(alone)},
    }
    pictures = plots.of_peers(content)
    assert set(pictures) == {"peers-001-6", "peers-first-token-alone", "peers-first-token-together"}
    assert "30 layers" in pictures["peers-001-6"]
    curve = [{"p": p, "items/s with": 100 * p, "items/s without": 50.0} for p in (0.1, 0.5, 1.0)]
    items = ET.fromstring(plots.of_engine({"rows": [{"row": "000-figure-2", "rows": curve}]})["items-by-p"])
    assert len(list(items.iter(f"{_SVG}polyline"))) == 2
    rows = [
        {"row": "001-6", "rows": [{"cache": "full blocks", "without / with": 2.0}]},
        {"row": "000-7", "rows": [{"p": 0.1, "answer tokens": 16, "ratio": 0.5}]},
    ]
    bars = ET.fromstring(plots.of_engine({"rows": rows})["rows"])
    labels = [text.text for text in bars.iter(f"{_SVG}text")]
    assert "0.5" in labels
    assert "2" in labels


def test_the_gain_of_identical_prompts_falls_with_their_answers_as_the_costs_say() -> None:
    """A first token takes 10 ms with the cache and 40 ms without, and each further token 5 ms. So the gain is
    at least 1.1 while 30 >= 0.1 (10 + 5 (a - 1)).
    """
    points = [(a, 0.010 + 0.005 * (a - 1), 0.040 + 0.005 * (a - 1)) for a in (2, 16, 64)]
    costs = answer_costs.fit(points)
    assert costs.gain(1) == pytest.approx(4.0)
    assert costs.longest_for(1.1) == pytest.approx(59.0)
    assert costs.gain(costs.longest_for(1.1)) == pytest.approx(1.1)
    rows = [
        {"answer tokens": a, "ratio": without / used, "by the costs": costs.gain(a)}
        for a, used, without in points
    ]
    pictures = plots.of_engine({"rows": [{"row": "000-7-by-answer", "rows": rows}]})
    assert len(list(ET.fromstring(pictures["gain-by-answer"]).iter(f"{_SVG}polyline"))) == 2


@pytest.mark.parametrize("common", [True, False])
def test_the_bench_of_partial_matches_runs_with_an_intact_cache(*, common: bool) -> None:
    assert all(us > 0 for us in bench_partial.measure(30, common=common, rounds=1))


@pytest.mark.parametrize("rest_s", [1.4, 1.25])
def test_the_costs_of_a_serving_load_are_the_two_that_were_measured(rest_s: float) -> None:
    costs = step_costs.fitted(whole_s=2.0, rest_s=rest_s, decode_s=0.1)
    assert costs.prefill_s(start=0, num_tokens=853) == pytest.approx(2.0)
    assert costs.prefill_s(start=320, num_tokens=533) == pytest.approx(rest_s, rel=0.001)


def test_the_cache_shortens_further_tokens_only_where_requests_wait_for_each_others_prompts() -> None:
    costs = step_costs.fitted(whole_s=2.0, rest_s=1.4, decode_s=0.1)
    ttft, tpot = step_costs.ratios(costs, rate_per_s=0.001, requests=4, seeds=[1])
    assert ttft == pytest.approx(0.7)
    assert tpot == pytest.approx(1.0)
    _, beside = step_costs.ratios(costs, rate_per_s=0.5, requests=4, seeds=[1])
    assert beside < 0.95
