"""Several runs at once, each in a process of its own."""

from __future__ import annotations

import pytest

from epp.config.policy import DEFAULT_POLICY
from epp.tools.replay.parallel import Candidate, run_all
from epp.tools.replay.simulate import Setting, run
from epp.tools.replay.trace import Call, Piece, ReplayError, Server, Trace

SERVER = Server(name="a", capacity_tokens=10**5, prefill_tokens_per_s=8000.0)
TRACE = Trace(
    calls=[Call(at_s=float(n), pieces=(Piece(n % 3, 4096, 1024),), output_tokens=2) for n in range(20)],
    servers=[SERVER],
)


def test_results_come_in_the_given_order_and_equal_those_of_one_process() -> None:
    candidates = [Candidate(name=name, policy=DEFAULT_POLICY) for name in ("z", "a", "m")]
    told: list[dict[str, float]] = []
    found = run_all(
        TRACE, candidates, Setting(), processes=2, on_progress=lambda shares: told.append(dict(shares))
    )
    alone = run(TRACE, DEFAULT_POLICY, Setting(), progress=lambda _: None)
    assert list(found) == ["z", "a", "m"]
    assert all(figures == alone for figures in found.values())
    assert told[-1] == {"z": 1.0, "a": 1.0, "m": 1.0}
    assert told[0]["m"] == 0.0, "the third run waits for a free process"


def test_a_run_that_fails_fails_the_replay_and_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    broken = Trace(calls=TRACE.calls, servers=[Server(name="a", capacity_tokens=1, prefill_tokens_per_s=0.0)])
    candidates = [Candidate(name="broken", policy=DEFAULT_POLICY)]
    with pytest.raises(ReplayError, match="the run of broken failed; its error is printed above"):
        run_all(broken, candidates, Setting(), processes=1, on_progress=lambda _: None)
    assert "prefill_tokens_per_s must be positive" in capfd.readouterr().err
