"""A source that fails is started again, and never ends the picker."""

import asyncio
import contextlib
import random
import tracemalloc
import weakref
from collections.abc import AsyncIterator

import pytest

from epp.base.errors import ConfigError
from epp.sources.keep import Pauses, Sources
from tests.harness.panic import Panic
from tests.harness.processes import wait_until


class FailingSource:
    """Raises its errors one by one, then runs on."""

    def __init__(self, *errors: BaseException | None) -> None:
        self._errors = list(errors)
        self.runs = 0

    async def run(self) -> None:
        self.runs += 1
        if not self._errors:
            await asyncio.get_running_loop().create_future()
        error = self._errors.pop(0)
        if error is not None:
            raise error


@contextlib.asynccontextmanager
async def kept(sources: Sources, failing: FailingSource) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(sources.keep("file", failing.run), name="watcher of policy.yaml")
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def sources(first_pause_s: float = 0.001) -> Sources:
    return Sources(rng=random.Random(1), first_pause_s=first_pause_s)


async def test_source_that_fails_is_started_again_with_reason_logged_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = (
        RecursionError("deep"),
        ConfigError("no way in"),
        ExceptionGroup("of a group", [KeyError("bool")]),
        Panic("of a package"),
        asyncio.CancelledError("of a library"),
        None,
    )
    failing, kept_by = FailingSource(*errors), sources()
    async with kept(kept_by, failing) as task:
        await wait_until(
            lambda: failing.runs == len(errors) + 1, what="the source was started after every failure"
        )
        assert not task.done()
    assert kept_by.failures == {"file": len(errors)}
    logged = [r for r in caplog.records if r.name == "epp.sources.keep"]
    assert all(r.getMessage().startswith("watcher of policy.yaml failed") for r in logged)
    reasons = [r.getMessage().partition("stays in use: ")[2] for r in logged]
    assert reasons[0] == "RecursionError: deep"
    assert reasons[-1] == "it returned"
    assert [r.exc_info is not None for r in logged] == [True, False, True, True, True, False]


async def test_a_source_that_is_cancelled_ends_and_leaves_nothing() -> None:
    failing, kept_by = FailingSource(), sources()
    used, task = weakref.ref(failing), asyncio.create_task(kept_by.keep("file", failing.run))
    del failing
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert kept_by.failures == {"file": 0}
    del task
    assert used() is None, "it waits for no garbage collector"


async def test_a_source_that_fails_does_not_affect_the_others() -> None:
    bad, good, kept_by = FailingSource(*[OSError("away")] * 5), FailingSource(), sources()
    async with kept(kept_by, bad), kept(kept_by, good):
        await wait_until(lambda: bad.runs == 6, what="the failing source was started again")
        assert good.runs == 1


async def test_many_sources_that_fail_together_take_little_memory() -> None:
    failing, kept_by = FailingSource(*[ConfigError("away")] * 500), sources(first_pause_s=60.0)
    tracemalloc.start()
    loops = [asyncio.create_task(kept_by.keep("file", failing.run), name=f"loop {n}") for n in range(500)]
    await wait_until(lambda: failing.runs == 500, what="all have failed")
    taken_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept_by.failing(now=0.0)) == 500
    for loop in loops:
        loop.cancel()
    await asyncio.wait(loops)
    assert taken_bytes < 500 * 8_000


def test_pauses_double_up_to_a_bound_and_are_short_again_after_a_reset() -> None:
    pauses = Pauses(random.Random(1), first_s=1.0, longest_s=8.0)
    found = [pauses.next_s() for _ in range(6)]
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(found, (1, 2, 4, 8, 8, 8), strict=True))
    pauses.reset()
    assert pauses.next_s() <= 1.0
