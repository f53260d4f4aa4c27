"""The driver with its own clock: tokens come when the cost model says, and late wake-ups do not add up."""

import asyncio
import functools
from dataclasses import dataclass

import pytest

from model_server.core.engine import Engine, EngineConfig
from model_server.core.request import Request
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel, CostRunner
from model_server.server.driver import EngineDriver, Mailbox
from model_server.server.errors import ApiError, DrainingError, EngineStoppedError, QueueFullError
from model_server.server.metrics import Metrics
from model_server.text.answers import Answers
from model_server.text.standin import StandInLanguage
from model_server.text.tokenizer import Tokenizer
from tests.harness.engine_requests import request_of as any_request

request_of = functools.partial(any_request, name="r", arrival_s=100.0, ignore_eos=True)

COSTS = CostModel(
    prefill_tokens_per_s=1000,
    context_knee_tokens=1e12,
    decode_step_s=0.01,
    decode_per_request_s=0,
    decode_per_context_token_s=0,
)


@dataclass
class Time:
    """A clock that moves only while the driver sleeps. Each sleep takes `late_s` longer than asked for."""

    late_s: float = 0.0
    now: float = 100.0
    sleeps: int = 0

    def clock(self) -> float:
        return self.now

    async def sleep(self, duration_s: float) -> None:
        self.sleeps += 1
        self.now += duration_s + self.late_s
        await asyncio.sleep(0)


def driver_of(time: Time, *, max_waiting: int = 10) -> EngineDriver:
    tokenizer = Tokenizer()
    answers = Answers(tokenizer, mean_tokens=50)
    runner = CostRunner(COSTS, max_loras=1, next_token=answers.next_token)
    config = EngineConfig(
        eos_token_id=answers.eos_token_id, limits=SchedulerLimits(max_num_batched_tokens=100_000)
    )
    engine = Engine(config, runner)
    metrics = Metrics(model_name="m", max_loras=1, wall_clock=time.clock)
    return EngineDriver(
        engine,
        language=StandInLanguage(tokenizer, eos_token_id=answers.eos_token_id),
        metrics=metrics,
        clock=time.clock,
        sleep=time.sleep,
        max_waiting=max_waiting,
        stream_interval=1,
    )


async def run_one(driver: EngineDriver, request: Request) -> None:
    mailbox = Mailbox()
    async with asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(driver.run())
        driver.submit([request], mailbox, stream=False)
        [delta] = await mailbox.take()
        assert delta.finish_reason == "length"
        loop.cancel()


async def test_tokens_come_at_the_times_of_the_cost_model() -> None:
    time = Time()
    request = request_of(2000, max_tokens=11)
    await run_one(driver_of(time), request)
    assert request.first_token_s == pytest.approx(102.0)
    assert request.last_token_s == pytest.approx(102.1)


async def test_late_wake_ups_do_not_add_up() -> None:
    request = request_of(2000, max_tokens=101)
    await run_one(driver_of(Time(late_s=0.004)), request)
    assert request.last_token_s == pytest.approx(103.0, abs=0.005)


async def test_a_machine_that_cannot_keep_up_does_not_spin_to_catch_up() -> None:
    """Each wake-up is late by ten steps. The delay is forgotten, so the steps are as slow as the machine."""
    time = Time(late_s=0.1)
    request = request_of(2000, max_tokens=101)
    await run_one(driver_of(time), request)
    assert request.last_token_s is not None
    assert request.last_token_s > 110.0
    assert time.sleeps == 101


async def test_an_idle_loop_never_sleeps_on_the_clock() -> None:
    time = Time()
    driver = driver_of(time)
    async with asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(driver.run())
        for _ in range(50):
            await asyncio.sleep(0)
        loop.cancel()
    assert time.sleeps == 0


async def test_the_queue_takes_all_prompts_of_a_request_or_none() -> None:
    driver = driver_of(Time(), max_waiting=3)
    several = [request_of(5, max_tokens=1, name=str(i)) for i in range(4)]
    with pytest.raises(ApiError, match="send several smaller requests") as never:
        driver.submit(several, Mailbox(), stream=False)
    assert never.value.status == 400
    driver.submit(several[:3], Mailbox(), stream=False)
    with pytest.raises(QueueFullError):
        driver.submit(several[3:], Mailbox(), stream=False)
    driver.abort(several)
    driver.submit(several[3:], Mailbox(), stream=False)


async def test_when_the_loop_ends_waiting_readers_get_an_error() -> None:
    driver = driver_of(Time())
    mailbox = Mailbox()
    loop = asyncio.create_task(driver.run())
    driver.submit([request_of(2000, max_tokens=10_000)], mailbox, stream=False)
    await asyncio.sleep(0)
    loop.cancel()
    with pytest.raises(EngineStoppedError):
        await mailbox.take()
    with pytest.raises(DrainingError):
        driver.submit([request_of(5, max_tokens=1, name="late")], Mailbox(), stream=False)
