"""Runs the short form of `make soak`, which takes a quarter of a minute."""

from pathlib import Path

import pytest

from bench.soak.load import RequestCounts
from bench.soak.run import Report, _judge, soak

pytest_plugins = ["tests.harness.fixtures"]


@pytest.mark.envoy
async def test_a_mixed_load_with_faults_fails_and_leaves_nothing(tmp_path: Path) -> None:
    report = await soak(16.0, users=6, attacks=False, directory=tmp_path)
    assert report.faults == []
    assert report.done["kill"] >= 1
    assert report.done["flush"] >= 3
    assert all(report.seen.sent[kind] for kind in ("usual", "streamed", "abandoned", "hostile"))


def test_memory_that_goes_on_growing_is_a_fault() -> None:
    flat, growing = Report(RequestCounts()), Report(RequestCounts())
    flat.mib[1] = [80.0] * 12
    growing.mib[1] = [80.0 + 10 * n for n in range(12)]
    for report in (flat, growing):
        _judge(report)
    assert flat.faults == []
    assert len(growing.faults) == 1


def test_a_request_that_meets_the_sick_server_is_counted_and_is_no_fault() -> None:
    report = Report(RequestCounts(), shares={"sick: 500": 0.01})
    report.seen.seconds |= {"sick: 500": [0.01] * 100, "settings": [0.01] * 100, "unread": [0.06] * 100}
    report.seen.fail("usual: status 500", attacker="sick: 500")
    _judge(report)
    assert report.faults == []
    assert [row[-1] for row in report.rows()] == ["met", "met", "missed"]
    report.seen.fail("usual: status 503", attacker="settings")
    _judge(report)
    assert len(report.faults) == 1
    assert [row[-1] for row in report.rows()] == ["met", "missed", "missed"]
