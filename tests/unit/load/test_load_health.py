"""The load generator reports when it was itself the bottleneck."""

from __future__ import annotations

import json
import math

import pytest

from bench.load.health import LOOK_S, Health


def calm(seconds: int = 60, *, cpu: float = 0.2, waited: float = 0.01) -> Health:
    health = Health()
    for _ in range(seconds):
        health.note_window(wall_s=1.0, cpu_s=cpu, waited_s=waited)
        for _ in range(round(1 / LOOK_S)):
            health.note_wake(late_s=0.0005)
    return health


def test_a_generator_with_time_to_spare_reports_no_bottleneck() -> None:
    health = calm()
    assert health.verdict(median_ttft_s=0.1) == []
    assert "CPU 20% of a core" in health.summary()
    health.check_integrity()


def test_a_full_core_is_a_bottleneck_even_for_a_part_of_the_run() -> None:
    health = calm(50)
    for _ in range(10):
        health.note_window(wall_s=1.0, cpu_s=0.97, waited_s=0.0)
    (reason,) = health.verdict(median_ttft_s=0.1)
    assert "10 of 60 seconds" in reason
    assert "--processes" in reason


def test_a_late_wake_counts_for_its_whole_length() -> None:
    """One look that comes a second late stands for 20 looks that did not come."""
    health = calm(60)
    health.note_wake(late_s=1.0)
    assert health.lag_s.count == 60 * 20 + 20
    (reason,) = health.verdict(median_ttft_s=0.1)
    assert "event loop" in reason
    assert "1,000 ms" in reason


def test_the_verdict_distinguishes_own_work_from_a_machine_that_others_use() -> None:
    busy, crowded = calm(cpu=0.7), calm(cpu=0.05, waited=0.3)
    for health in (busy, crowded):
        for _ in range(50):
            health.note_wake(late_s=0.04)
    assert "--processes" in busy.verdict(median_ttft_s=0.1)[0]
    assert "waited 30% of the time" in crowded.verdict(median_ttft_s=0.1)[0]
    assert "machine of its own" in crowded.verdict(median_ttft_s=0.1)[0]


def test_requests_that_are_sent_late_are_a_bottleneck() -> None:
    health = calm()
    for n in range(100):
        health.note_sent(due_at=float(n), sent_at=n + (0.5 if n > 90 else 0.001))
    (reason,) = health.verdict(median_ttft_s=0.1)
    assert "due moments" in reason
    assert "500 ms" in reason


@pytest.mark.parametrize(("median_ttft_s", "reasons"), [(0.2, 1), (10.0, 0), (math.nan, 1)])
def test_lateness_matters_relative_to_the_measured_ttft(median_ttft_s: float, reasons: int) -> None:
    """40 ms are much for a TTFT of 200 ms and nothing for a TTFT of 10 s."""
    health = calm()
    for _ in range(100):
        health.note_wake(late_s=0.04)
    assert len(health.verdict(median_ttft_s=median_ttft_s)) == reasons


def test_one_overloaded_worker_among_four_is_reported() -> None:
    whole = Health()
    for cpu in (0.2, 0.2, 0.2, 0.99):
        whole.merge(Health.of(json.loads(json.dumps(calm(cpu=cpu).document()))))
    assert whole.windows == 240
    assert "60 of 240" in whole.verdict(median_ttft_s=0.1)[0]
    whole.check_integrity()


def test_a_run_too_short_to_watch_has_no_verdict_and_says_why() -> None:
    assert Health().verdict(median_ttft_s=0.1) == []
    assert "too short" in Health().summary()
