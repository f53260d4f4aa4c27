"""Traces in the format that Mooncake published."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.tools.replay import mooncake
from epp.tools.replay.reading import read
from epp.tools.replay.trace import ReplayError
from tests.unit.tools.replay.recordings import json_lines

ROW = {"timestamp": 2000, "input_length": 700, "output_length": 9, "hash_ids": [1, 7]}
SHORT = {"timestamp": 500, "input_length": 512, "output_length": 30, "hash_ids": [1]}


def test_mooncakes_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(json_lines(ROW, SHORT).encode())
    first, second = read([path]).calls
    assert (first.at_s, first.output_tokens, first.prompt_tokens) == (0.0, 30, 512)
    assert (second.at_s, second.prompt_tokens) == (1.5, 700)
    assert second.pieces[0] == first.pieces[0]
    assert [piece.num_tokens for piece in second.pieces] == [512, 188]


def test_only_a_file_whose_first_line_has_hash_ids_is_a_mooncake_trace() -> None:
    assert mooncake.is_one(b"\n  " + json_lines(ROW).encode())
    assert not mooncake.is_one(b'{"line": "recording"}\n' + json_lines(ROW).encode())
    assert not mooncake.is_one(b"")


def test_an_answer_has_at_least_one_token_and_empty_lines_are_skipped() -> None:
    (call,) = mooncake.parse(b"\n" + json_lines({**SHORT, "output_length": 0}).encode() + b"  \n", name="f")
    assert call.output_tokens == 1


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({**ROW, "hash_ids": [1]}, "line 2: 1 blocks of 512 tokens are not 700 tokens"),
        ({**ROW, "input_length": 0, "hash_ids": []}, "line 2: 0 blocks of 512 tokens are not 0 tokens"),
        ({**ROW, "hash_ids": [-1, 2]}, "line 2: Expected `int` >= 0"),
        ({**ROW, "output_length": 2**18 + 1}, "line 2: Expected `int` <= 262144"),
        ({**ROW, "input_length": 2**40}, "line 2: Expected `int` <= 16777216"),
        ({"hash_ids": [1]}, "line 2: Object missing required field `timestamp`"),
        ("[" * 10, "line 2: Expected `object`"),
    ],
)
def test_a_line_that_is_not_a_request_is_refused_by_its_number(row: object, fault: str) -> None:
    with pytest.raises(ReplayError, match=fault):
        list(mooncake.parse(json_lines(SHORT, row).encode(), name="f"))
