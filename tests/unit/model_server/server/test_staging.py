"""Requests wait until their prefix is fetched, and for nothing else. A store that fails costs only time."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import pytest_asyncio

from model_server.core.blocks import Block
from model_server.core.engine import Engine, EngineConfig
from model_server.core.hashing import BlockHash
from model_server.core.request import NO_TOKEN, LoadedPrefix, OutsidePrefix, Request, RequestId, TokenId
from model_server.runners.cost import CostModel, CostRunner
from model_server.server.driver import EngineDriver, Mailbox
from model_server.server.metrics import Metrics
from model_server.server.staging import Staging
from model_server.text.answers import Answers
from model_server.text.standin import StandInLanguage
from model_server.text.tokenizer import Tokenizer
from model_server.tiers.status import StoreStatus
from tests.harness.http_model_server import until

STATUS = StoreStatus()


class Tiers:
    """A store that claims to have every prefix, and returns it when the test lets it."""

    approximation = "sel:0.5"

    def __init__(self) -> None:
        self.held = 1000
        self.gate = threading.Event()
        self.gate.set()
        self.found: Callable[[Sequence[BlockHash], int], LoadedPrefix | OutsidePrefix | None] = loaded
        self.fetched: list[int] = []
        self.saved: list[tuple[RequestId, int]] = []
        self.closed = False

    def num_held(self, hashes: Sequence[BlockHash]) -> int:
        return min(self.held, len(hashes))

    def fetch(self, hashes: Sequence[BlockHash], *, first_block: int) -> LoadedPrefix | OutsidePrefix | None:
        assert self.gate.wait(timeout=60)
        self.fetched.append(first_block)
        return self.found(hashes, first_block)

    def save(self, request: Request, table: Sequence[Block], *, num_tokens: int) -> None:
        self.saved.append((request.request_id, num_tokens))

    def learn_from(self, request: Request) -> None:
        raise OSError("what is learnt is nobody's business")

    def status(self) -> StoreStatus:
        return STATUS

    def close(self, *, timeout_s: float) -> None:
        self.closed = True


def loaded(hashes: Sequence[BlockHash], first_block: int) -> LoadedPrefix:
    return LoadedPrefix(first_block, len(hashes), 100 * len(hashes), None)


class StagedEngine:
    def __init__(self) -> None:
        tokenizer = Tokenizer()
        answers = Answers(tokenizer, mean_tokens=50)
        runner = CostRunner(CostModel(), max_loras=1, next_token=answers.next_token)
        self.engine = Engine(EngineConfig(num_blocks=64, block_size_tokens=4, eos_token_id=NO_TOKEN), runner)
        self.tiers = Tiers()
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.staging = Staging(self.engine, self.tiers, step_thread=self.thread, staged_bytes=500)
        self.time = 0.0
        self.driver = EngineDriver(
            self.engine,
            language=StandInLanguage(tokenizer, eos_token_id=answers.eos_token_id),
            metrics=Metrics(model_name="m", max_loras=1, wall_clock=lambda: 0.0),
            clock=lambda: self.time,
            sleep=self.sleep,
            max_waiting=10,
            stream_interval=1,
            staging=self.staging,
        )

    async def sleep(self, duration_s: float) -> None:
        self.time += duration_s
        await asyncio.sleep(0)

    def submit(self, name: str, *, first: int = 0) -> tuple[Request, Mailbox]:
        tokens = [TokenId(first + token) for token in range(21)]
        request = Request(RequestId(name), tokens, max_tokens=3, arrival_s=0.0, ignore_eos=True)
        mailbox = Mailbox()
        self.driver.submit([request], mailbox, stream=False)
        return request, mailbox

    async def answer(self, name: str, *, first: int = 0) -> Request:
        request, mailbox = self.submit(name, first=first)
        await self.ended(mailbox)
        return request

    async def ended(self, mailbox: Mailbox) -> None:
        async with asyncio.timeout(60):
            await mailbox.take()
        self.engine.check_integrity()


@pytest_asyncio.fixture
async def serving() -> AsyncIterator[StagedEngine]:
    made = StagedEngine()
    loop = asyncio.create_task(made.driver.run())
    yield made
    made.tiers.gate.set()
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop
    if not made.tiers.closed:
        await made.staging.close(timeout_s=60)
    assert made.tiers.closed
    made.thread.shutdown()


async def test_a_request_waits_for_its_prefix_while_others_are_served(serving: StagedEngine) -> None:
    serving.tiers.gate.clear()
    request, mailbox = serving.submit("stored")
    assert request.loading
    serving.tiers.held = 0
    assert (await serving.answer("other", first=100)).num_cached_tokens == 0
    assert request.finish_reason is None
    assert list(serving.engine.scheduler.waiting) == [request]
    serving.tiers.gate.set()
    await serving.ended(mailbox)
    assert (request.num_cached_tokens, request.num_stored_tokens) == (20, 20)


async def test_a_prefix_that_is_in_the_blocks_is_not_fetched(serving: StagedEngine) -> None:
    serving.tiers.held = 0
    await serving.answer("computed")
    serving.tiers.held = 1000
    again = await serving.answer("again")
    assert (again.num_cached_tokens, again.num_stored_tokens) == (20, 0)
    assert serving.tiers.fetched == []


async def test_a_request_is_computed_if_its_fetch_finds_nothing_or_fails(serving: StagedEngine) -> None:
    def fails(_: Sequence[BlockHash], __: int) -> None:
        raise RuntimeError("a fault of ours")

    for number, found in enumerate((lambda *_: None, fails)):
        serving.tiers.found = found
        request = await serving.answer(str(number), first=100 * number)
        assert (request.num_cached_tokens, request.num_stored_tokens) == (0, 0)
    assert serving.tiers.fetched == [0, 0]


async def test_a_prefix_read_outside_makes_the_request_approximate(serving: StagedEngine) -> None:
    serving.tiers.found = lambda hashes, _: OutsidePrefix(len(hashes), None)
    request = await serving.answer("selective")
    assert request.scope.approximation == "sel:0.5"
    assert (request.num_cached_tokens, request.num_stored_tokens) == (20, 20)


async def test_a_request_that_goes_away_while_it_loads_leaves_nothing(serving: StagedEngine) -> None:
    serving.tiers.gate.clear()
    gone, _ = serving.submit("gone")
    later, _ = serving.submit("later", first=100)
    serving.driver.abort([gone, later])
    assert serving.engine.num_unfinished == 0
    serving.tiers.gate.set()
    assert (await serving.answer("next", first=200)).num_stored_tokens == 20
    assert gone.stored is None
    assert len(serving.tiers.fetched) == 2, "the second fetch was not begun"


async def test_a_request_that_leaves_early_makes_room_for_the_next_fetch() -> None:
    """No step could notice that the request is gone, because all others wait for its fetch."""
    serving = StagedEngine()
    gone, _ = serving.submit("gone")
    later, _ = serving.submit("later", first=100)
    await until(lambda: gone.stored is not None)
    assert later.loading
    serving.driver.abort([gone])
    await until(lambda: not later.loading)
    assert later.stored is not None
    serving.driver.abort([later])
    await serving.staging.close(timeout_s=60)
    serving.thread.shutdown()


async def test_the_bytes_that_are_fetched_ahead_are_bounded(serving: StagedEngine) -> None:
    """Each prefix takes all of the room. So each is fetched after the one before is admitted, in the order
    in which they came.
    """
    mailboxes = [serving.submit(str(number), first=100 * number)[1] for number in range(4)]
    for mailbox in mailboxes:
        await serving.ended(mailbox)
    assert serving.tiers.fetched == [0, 0, 0, 0]


async def test_closing_waits_for_a_running_fetch(serving: StagedEngine) -> None:
    serving.tiers.gate.clear()
    request, _ = serving.submit("stored")
    closing = asyncio.create_task(serving.staging.close(timeout_s=60))
    await asyncio.sleep(0)
    serving.tiers.gate.set()
    await closing
    assert not request.loading


@pytest.mark.parametrize("ahead", [0, 499])
async def test_a_second_fetch_begins_while_less_than_the_bound_is_staged(
    serving: StagedEngine, ahead: int
) -> None:
    serving.tiers.found = lambda hashes, first: LoadedPrefix(first, len(hashes), ahead, None)
    serving.tiers.gate.clear()
    submitted = [serving.submit(str(number), first=100 * number) for number in range(2)]
    requests, mailboxes = zip(*submitted, strict=True)
    assert all(request.loading for request in requests)
    serving.tiers.gate.set()
    for mailbox in mailboxes:
        await serving.ended(mailbox)
    assert [request.num_stored_tokens for request in requests] == [20, 20]
