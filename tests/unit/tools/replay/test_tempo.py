"""How fast the recorded servers were, from sampled answers, and how long the other answers were."""

from __future__ import annotations

from typing import Any

import pytest

from epp.observe.recording.lines import RecordedRequest
from epp.tools.replay.tempo import Tempo, tpots_s
from epp.tools.replay.trace import RecordedServer

SERVERS = [RecordedServer(name="a", capacity_tokens=10**5, prefill_tokens_per_s=8000.0)]


def asked(at: float = 0.0, **more: Any) -> RecordedRequest:
    usual: dict[str, Any] = {
        "kind": "chat",
        "prompt_bytes": 400,
        "prompt_tokens": 100,
        "reason": "r",
        "server": "a",
        "outcome": "ended",
    }
    return RecordedRequest(**(usual | {"at_unix_s": at, "ended_s": 1.2} | more))


def sampled(at: float = 0.0, *, tokens: int = 51, ttft_s: float = 0.2, **more: Any) -> RecordedRequest:
    return asked(at, output_tokens=tokens, ttft_s=ttft_s, **more)


def test_the_time_of_a_token_comes_from_sampled_answers_of_several_tokens() -> None:
    assert tpots_s([sampled(), sampled(tokens=11), sampled(tokens=1), asked()]) == pytest.approx([0.02, 0.1])
    assert tpots_s([sampled(ttft_s=2.0)]) == [], "the first token came after the end: clocks differ"


def test_an_answer_without_a_length_is_as_long_as_its_time_allows() -> None:
    requests = [sampled(10.0 * n) for n in range(3)] + [asked(40.0, ended_s=2.2)]
    tempo = Tempo.of(requests, SERVERS)
    assert [tempo.output_tokens(request) for request in requests] == [51, 51, 51, 100]
    assert tempo.output_tokens(asked(ended_s=0.0)) == 1
    assert tempo.output_tokens(asked(ended_s=1e9)) == 16_384
    assert tempo.output_tokens(sampled(tokens=2**29)) == 2**18
    (remark,) = tempo.remarks
    assert "3 of 4 answers have a recorded length" in remark
    assert "by the speed of the sampled answers" in remark


def test_without_a_sampled_answer_the_tempo_is_guess_and_is_marked_as_one() -> None:
    tempo = Tempo.of([asked(0.0), asked(10.0)], SERVERS)
    assert tempo.decode_step_s is None
    assert tempo.output_tokens(asked(ended_s=1.0)) == 50
    assert "at a guessed 20 ms a token" in tempo.remarks[0]


def test_there_is_no_remark_if_every_length_was_recorded() -> None:
    assert Tempo.of([sampled(0.0), sampled(10.0)], SERVERS).remarks == ()


def test_the_step_of_a_busy_server_is_shorter_than_the_time_of_a_token() -> None:
    """Prefills stall the answers, and a batch takes longer: the simulator adds both by itself."""
    calm = Tempo.of([sampled(100.0 * n) for n in range(10)], SERVERS).decode_step_s
    busy = Tempo.of(
        [sampled(1.0 * n, prompt_tokens=4000, matched_tokens=0) for n in range(10)], SERVERS
    ).decode_step_s
    assert calm is not None
    assert busy is not None
    assert calm == pytest.approx(0.02, rel=0.02)
    assert 0.001 <= busy < 0.7 * calm
