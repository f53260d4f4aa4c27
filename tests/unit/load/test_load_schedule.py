"""The open loop on the test's own clock. Nothing that the generator or the server does changes when a
request is due.
"""

from __future__ import annotations

import pytest

from bench.load.health import Health
from bench.load.schedule import Schedule, share
from bench.load.trace import Call


def calls(*at_s: float) -> list[Call]:
    return [Call(at_s=at, blocks=(n,), prompt_tokens=1, output_tokens=1) for n, at in enumerate(at_s)]


def test_each_call_is_handed_out_once_when_it_is_due() -> None:
    schedule = Schedule(calls(0.0, 0.5, 0.5, 2.0), started_at=100.0)
    assert [due.due_at for due in schedule.take(now=100.0)] == [100.0]
    assert schedule.wait_s(now=100.2) == pytest.approx(0.3)
    assert schedule.take(now=100.49) == []
    assert [due.call.blocks for due in schedule.take(now=100.5)] == [(1,), (2,)]
    assert not schedule.finished
    assert [due.due_at for due in schedule.take(now=103.0)] == [102.0]
    assert schedule.finished
    assert schedule.take(now=200.0) == []
    schedule.check_integrity()


def test_a_generator_that_slept_sends_all_missed_calls_at_once_and_each_has_its_own_lateness() -> None:
    schedule = Schedule(calls(*(0.1 * n for n in range(20))), started_at=0.0)
    health = Health()
    for due in schedule.take(now=0.0):
        health.note_sent(due_at=due.due_at, sent_at=0.0)
    missed = schedule.take(now=1.0)  # the loop sleeps for a second
    assert len(missed) == 10
    for due in missed:
        health.note_sent(due_at=due.due_at, sent_at=1.0)
    assert health.lateness_s.count == 11
    assert health.lateness_s.most == pytest.approx(0.9)
    assert health.lateness_s.total == pytest.approx(sum(0.1 * n for n in range(10)))


def test_every_request_that_is_due_while_a_server_stands_still_measures_the_stop() -> None:
    """One request is due every 100 ms. Answers take 10 ms, except during a stop from 1.0 to 2.0. A closed
    loop of one user would see the stop once.
    """
    schedule = Schedule(calls(*(0.1 * n for n in range(30))), started_at=0.0)
    ttfts, now = [], 0.0
    while not schedule.finished:
        for due in schedule.take(now=now):
            answered_at = max(now, 2.0) + 0.01 if 1.0 <= now < 2.0 else now + 0.01
            ttfts.append(answered_at - due.due_at)
        if not schedule.finished:
            now += schedule.wait_s(now=now)
    slow = [ttft for ttft in ttfts if ttft > 0.05]
    assert len(slow) == 10
    assert max(slow) == pytest.approx(1.01)


def test_workers_share_a_trace_without_loss_and_keep_its_times() -> None:
    whole = calls(*(0.3 * n for n in range(11)))
    parts = [share(whole, worker=n, workers=3) for n in range(3)]
    assert sorted((call for part in parts for call in part), key=lambda call: call.at_s) == whole
