"""The load generator: how it reads answers, and what it reports."""

import json
import os
import random
from pathlib import Path

import pytest

from bench.demo.address import Place, announced, running
from bench.load.figures import LOOK_S, Figures, Health, Samples
from bench.load.report import generator_lines
from bench.load.sse import AnswerError, read_answer

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":90,"completion_tokens":9}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_is_the_same_however_its_bytes_are_cut(size: int) -> None:
    body = TOKEN + TOKEN + USAGE + DONE
    answer = read_answer([(float(at), body[at : at + size]) for at in range(0, len(body), size)])
    assert (answer.text, answer.output_tokens, answer.prompt_tokens) == ("aa", 9, 90)
    assert answer.first_token_at == (len(TOKEN) - 2) // size * size, "the piece that ends its line"


@pytest.mark.parametrize(
    ("body", "kind"),
    [(TOKEN, "cut"), (DONE, "malformed"), (TOKEN + b'data: {"error": {}}\n\n', "error event")],
)
def test_an_incomplete_answer_is_an_error_with_its_class(body: bytes, kind: str) -> None:
    with pytest.raises(AnswerError) as caught:
        read_answer([(1.0, body)])
    assert caught.value.kind == kind


def test_quantiles_are_within_half_a_percent_and_add_up() -> None:
    rng = random.Random(1)
    values = sorted(rng.lognormvariate(-2, 1.5) for _ in range(5000))
    whole = Samples()
    for n in range(3):
        whole.merge(Samples.of(json.loads(json.dumps(Samples(values[n::3]).document()))))
    for share in (0.25, 0.5, 0.99):
        assert whole.quantile(share) == pytest.approx(values[round(share * 5000) - 1], rel=0.005)
    whole.check_integrity()


def test_the_verdict_tells_own_work_from_a_machine_that_others_use() -> None:
    for cpu, waited, warning in ((0.7, 0.01, "--processes"), (0.05, 0.3, "waited 30% of the time")):
        health = Health()
        for _ in range(60):
            health.note_window(wall_s=1.0, cpu_s=cpu, waited_s=waited)
            for _ in range(round(1 / LOOK_S)):
                health.note_wake(late_s=0.0005)
        assert health.verdict(median_ttft_s=0.1) == []
        for _ in range(50):
            health.note_wake(late_s=0.04)
        assert warning in health.verdict(median_ttft_s=0.1)[0]
        assert health.verdict(median_ttft_s=10.0) == [], "40 ms are little beside 10 s"


def test_a_generator_that_needs_a_whole_core_is_called_a_bottleneck() -> None:
    made = Figures(measures={"ttft_s": Samples([0.4])})
    assert generator_lines(made)[0].startswith("The generator kept up")
    for _ in range(10):
        made.health.note_window(wall_s=1.0, cpu_s=1.0, waited_s=0.0)
    head, reason, *_ = generator_lines(made)
    assert "BOTTLENECK" in head
    assert "10 of 10 seconds" in reason


def test_a_running_demo_is_found_and_a_killed_demo_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "999999999.address").write_text("http://killed")
    with announced("http://gw", directory=tmp_path):
        assert running(directory=tmp_path) == [Place(os.getpid(), "http://gw")]
    assert running(directory=tmp_path) == []
