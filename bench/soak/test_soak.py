"""Runs the short form of `make soak`, which takes a quarter of a minute."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.soak.load import RequestCounts
from bench.soak.run import Plan, Report, Sample, _judge, soak

pytest_plugins = ["tests.harness.fixtures"]

PLAN = Plan(seconds=16.0, users=6, kill_every_s=7.0, flush_every_s=3.0, sample_every_s=1.0)


@pytest.mark.envoy
async def test_a_mixed_load_with_faults_fails_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    report = await soak(PLAN, directory=tmp_path, say=print)
    assert report.faults == []
    assert report.kills >= 1
    assert report.flushes >= 3
    assert all(report.seen.sent[kind] for kind in ("usual", "streamed", "abandoned", "hostile"))


def test_memory_that_goes_on_growing_is_a_fault() -> None:
    flat = Report(RequestCounts(), samples=[Sample(n, 1, 80.0, 20) for n in range(10)])
    growing = Report(RequestCounts(), samples=[Sample(n, 1, 80.0 + 10 * n, 20) for n in range(10)])
    for report in (flat, growing):
        _judge(report)
    assert flat.faults == []
    assert len(growing.faults) == 1


def test_a_request_that_meets_the_sick_server_is_counted_and_is_no_fault() -> None:
    report = Report(RequestCounts())
    report.seen.fail("usual", "status 500", attacker="sick: 500")
    _judge(report)
    assert report.faults == []
    assert report.seen.failed_under == {"sick: 500": 1}
    report.seen.fail("usual", "status 503", attacker="settings")
    _judge(report)
    assert len(report.faults) == 1
