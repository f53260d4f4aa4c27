"""Traces of requests that the load generator reads or makes up."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench.load import prompts, trace

MOONCAKE = """\
{"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [5, 6, 7]}
{"timestamp": 1000, "input_length": 512, "output_length": 0, "hash_ids": [5]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,1000,109
"""


def test_mooncakes_lines_are_read_in_order_of_time_from_zero() -> None:
    first, second = trace.parse(MOONCAKE, name="x")
    assert (first.at_s, first.blocks, first.prompt_tokens, first.output_tokens) == (0.0, (5,), 512, 1)
    assert (second.at_s, second.blocks, second.prompt_tokens) == (2.0, (5, 6, 7), 1100)


def test_azures_rows_share_nothing() -> None:
    first, second = trace.parse(AZURE, name="x")
    assert second.at_s == pytest.approx(4.314579, abs=1e-5)
    assert (len(first.blocks), len(second.blocks)) == (1, 2)
    assert not set(first.blocks) & set(second.blocks)
    assert second.output_tokens == 109


def test_a_file_may_be_gzip_and_a_missing_or_broken_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl.gz"
    file.write_bytes(gzip.compress(MOONCAKE.encode()))
    assert len(trace.read(file)) == 2
    file.write_bytes(gzip.compress(MOONCAKE.encode())[:-20])
    for path in (file, tmp_path / "none"):
        with pytest.raises(trace.TraceError, match="cannot read the trace"):
            trace.read(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no request"),
        ('{"timestamp": 0}', "line 1: not an object with timestamp"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "are not 1 blocks"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "are not 0 blocks"),
        (
            '{"timestamp": Infinity, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
            "not an object with",
        ),
        ("time,tokens\n1,2\n", "line 2: no TIMESTAMP"),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(trace.TraceError, match=said):
        trace.parse(text, name="x")


def test_speed_and_scale_do_not_change_the_shared_blocks() -> None:
    calls = trace.parse(MOONCAKE, name="x")
    first, second = trace.prepared(calls, most=0, speed=4.0, scale=0.1)
    assert (second.at_s, second.prompt_tokens, second.blocks) == (0.5, 110, (5, 6, 7))
    assert trace.prepared(calls, most=1, speed=4.0, scale=0.1) == [first]


def test_a_made_up_trace_is_the_same_for_a_seed_and_after_writing_and_reading() -> None:
    calls = trace.generated(200, seed=7)
    assert calls == trace.generated(200, seed=7)
    assert calls != trace.generated(200, seed=8)
    read = trace.parse("\n".join(trace.lines(calls)), name="x")
    assert [(c.blocks, c.prompt_tokens, c.output_tokens) for c in read] == [
        (c.blocks, c.prompt_tokens, c.output_tokens) for c in calls
    ]
    assert [c.at_s for c in read] == pytest.approx([c.at_s for c in calls], abs=0.0006)


def test_a_made_up_trace_has_the_given_rate_shared_beginnings_and_continued_conversations() -> None:
    calls = trace.generated(1500, seed=3, rate_per_s=5.0)
    assert calls[-1].at_s == pytest.approx(1500 / 5.0, rel=0.25)
    assert len({call.blocks[0] for call in calls}) <= 8
    continued = sum(
        any(len(a.blocks) > 3 and a.blocks[:-1] == b.blocks[: len(a.blocks) - 1] for a in calls[:n])
        for n, b in enumerate(calls[:200])
    )
    assert continued > 20


def test_equal_blocks_are_equal_text_and_a_short_block_begins_a_long_one() -> None:
    whole = prompts.block_text(5, 100, whole_tokens=100, seed=1)
    assert prompts.block_text(5, 100, whole_tokens=100, seed=1) == whole
    assert whole.startswith(prompts.block_text(5, 40, whole_tokens=100, seed=1))
    assert prompts.block_text(6, 100, whole_tokens=100, seed=1) != whole
    assert prompts.block_text(5, 100, whole_tokens=100, seed=2) != whole


def test_lines_are_json_of_the_documented_fields() -> None:
    (line,) = trace.lines([trace.Call(at_s=1.5, blocks=(1, 2), prompt_tokens=600, output_tokens=3)])
    assert json.loads(line) == {
        "timestamp": 1500,
        "input_length": 600,
        "output_length": 3,
        "hash_ids": [1, 2],
    }
