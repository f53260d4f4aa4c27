"""The work that the picker does at regular times."""

import logging
import time

import pytest

from epp.config.policy import check_spec
from epp.observe.telemetry.metrics import Metrics
from epp.serve.upkeep import Upkeep
from tests.harness.processes import wait_until
from tests.harness.tasks import running_task
from tests.unit.observe.telemetry.records import new_metrics
from tests.unit.picker.picker_questions import a_picker, ask, endpoints, serve, text


def value(metrics: Metrics, name: str) -> float:
    return next(s.value for family in metrics.collect() for s in family.samples if s.name == name)


async def test_beginning_and_the_end_of_an_overload_are_each_logged_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "epp")
    shares = iter([0.0, 0.2, 0.5, 0.5, 0.0, 0.0])
    asked: list[float] = []

    def overload() -> float:
        asked.append(next(shares, 0.0))
        return asked[-1]

    metrics = new_metrics()
    async with running_task(Upkeep(a_picker(), metrics, overload=overload).watch_lag):
        await wait_until(lambda: len(asked) >= 6, what="six looks")
    assert [record.getMessage().partition(" and ")[0] for record in caplog.records] == [
        "the picker is overloaded",
        "the picker is no longer overloaded",
    ]
    assert value(metrics, "epp_loop_lag_seconds_count") == len(asked)


async def test_an_idle_picker_evicts_what_has_no_room() -> None:
    picker, metrics = a_picker(check_spec({"table": {"defaultCapacityTokens": 0}})), new_metrics()
    serve(picker, ask(text("p")), now=time.monotonic())
    assert picker.caches.table.entries
    async with running_task(Upkeep(picker, metrics, overload=lambda: 0.0).housekeep):
        await wait_until(lambda: not picker.caches.table.entries, what="the entries are evicted")
        assert value(metrics, "epp_tasks") >= 1


@pytest.mark.parametrize(
    ("status", "message"),
    [(500, "a gets only trial requests"), (404, "a, for the model 'm', gets only trial requests")],
)
async def test_a_server_that_fails_is_in_the_log_without_a_request(
    caplog: pytest.LogCaptureFixture, status: int, message: str
) -> None:
    picker = a_picker(on=endpoints("ab"))
    one, other = (frozenset({endpoint.address}) for endpoint in picker.news.endpoints())
    now = time.monotonic()
    for _ in range(8):
        serve(picker, ask(subset=one), now=now, status=status)
        serve(picker, ask(subset=other), now=now)
    async with running_task(Upkeep(picker, new_metrics(), overload=lambda: 0.0).housekeep):
        await wait_until(lambda: message in caplog.text, what="the line in the log")


def test_server_is_named_once_when_it_is_ejected_and_once_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    upkeep = Upkeep(a_picker(), new_metrics(), overload=lambda: 0.0)
    for why in ("", "its answers fail", "its answers fail", "its requests hang", ""):
        upkeep.log_ejected({"a": why} if why else {})
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "a gets only trial requests: its answers fail"),
        ("INFO", "a gets requests again"),
    ]
