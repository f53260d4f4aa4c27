"""Recordings become a trace, and a fault names its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epp.tools.replay.reading import read
from epp.tools.replay.trace import ReplayError
from tests.unit.tools.replay.recordings import json_lines, record


def test_a_recording_gives_times_sizes_and_equal_pieces(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record(path)
    trace = read([path])
    assert len(trace.calls) == 120
    assert [at_s for at_s, _ in trace.calls] == pytest.approx([n * 0.5 for n in range(120)])
    assert trace.policy is not None
    assert trace.policy.spec.rule == "least-cost"
    assert [server.name for server in trace.servers] == list("abcd")
    requests = [request for _, request in trace.calls]
    starts = {request.segments[:20] for request in requests}
    assert len(starts) == 4, "four shared beginnings"
    for request in requests:
        text_bytes = request.num_prompt_tokens * trace.bytes_per_token
        assert abs((text_bytes - 6000 + 350) % 700 - 350) < 8, "as long as the recorded prompt"
    assert len({request.segments[-1] for request in requests}) == 120, (
        "the text after the last full chunk belongs to one request alone"
    )


def test_the_length_of_an_unsampled_answer_is_derived_from_its_time(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record(path)
    trace = read([path])
    assert {request.answer.num_tokens for _, request in trace.calls} == {49, 50}, (
        "as many tokens as fit at the pace of the sampled answers"
    )
    assert any("12 of 120 answers have a recorded length" in remark for remark in trace.remarks)
    assert trace.recorded is not None
    assert trace.recorded.ttft_p50_s == pytest.approx(0.2)
    assert sum(trace.recorded.by_server.values()) == 120


def test_several_files_in_any_order_are_one_trace(tmp_path: Path) -> None:
    whole, old, new = (tmp_path / name for name in ("whole", "old", "new"))
    record(whole)
    opening, servers, *asked = whole.read_bytes().splitlines(keepends=True)
    old.write_bytes(b"".join([opening, servers, *asked[:60]]))
    new.write_bytes(b"".join([opening, servers, *asked[60:]]))
    assert read([new, old]).calls == read([whole]).calls


def test_a_last_line_that_was_cut_off_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record(path)
    path.write_bytes(path.read_bytes()[:-20])
    assert len(read([path]).calls) == 119


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no request"),
        ("nonsense\nmore\n", "line 1: JSON is malformed"),
        ("[" * 100_000 + "\n", "line 1: "),
        ('{"line":"recording","policy":' + "[" * 100_000 + "\n", "line 1: "),
        (json_lines({"line": "request"}), "line 1: Object missing required field"),
        (json_lines({"line": "recording", "version": 9, "chunk_bytes": 1, "later_chunk_bytes": 1, "later_from_bytes": 0, "hashing": "", "policy": {}}, {}), "line 1: the recording has version 9"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_recording_is_refused_with_its_line(
    tmp_path: Path, text: str, fault: str
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(ReplayError, match=fault):
        read([path])


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"prompt_bytes": 2**40}, "prompt_bytes"),
        ({"prompt_bytes": 1}, "more chunks than a prompt of 1 bytes has"),
        ({"at_unix_s": 1e300}, "at_unix_s"),
        ({"ended_s": -1.0}, "ended_s"),
        ({"output_tokens": 2**40}, "output_tokens"),
        ({"at_unix_s": 1e9}, "days apart"),
    ],
)
def test_an_impossible_request_is_refused_by_its_field(
    tmp_path: Path, wrong: dict[str, object], why: str
) -> None:
    """Simulated servers would carry out all of it: hours or gigabytes for a line of 300 bytes."""
    path = tmp_path / "r.jsonl"
    record(path, requests=20)
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    rows[-3] |= wrong
    path.write_text(json_lines(*rows))
    with pytest.raises(ReplayError, match=why):
        read([path])


def test_absurd_answers_and_caches_are_reduced(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record(path, requests=20)
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    rows[-1]["output_tokens"] = 2**29
    for row in rows:
        for server in row.get("servers", ()):
            server["capacity_tokens"] = 2**35
    path.write_text(json_lines(*rows))
    trace = read([path])
    assert max(request.answer.num_tokens for _, request in trace.calls) == 2**18
    assert {server.capacity_tokens for server in trace.servers} == {2**26}
