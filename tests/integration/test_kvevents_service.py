"""Exact mode on real ZeroMQ: faults turn it off and never the picker; a gateway that follows its server."""

import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
import zmq

from epp.base.types import Address, Endpoint, EndpointName
from epp.config.policy import DEFAULT_POLICY
from epp.config.sections import ExactMode
from epp.picker.decision import Question
from epp.picker.picker import Picker
from epp.request.parse import parse_request
from epp.sources.keep import Sources
from epp.sources.kvevents.exact import Exact, ModelSettings
from epp.sources.kvevents.routed_prompts import RoutedPrompts
from epp.sources.kvevents.sequence import Step
from epp.sources.kvevents.service import ExactService
from model_server.server.kv_publisher import KvEventSettings
from model_server.server.serve import Server, listening
from tests.harness.client import Client, http_client
from tests.harness.gateway import config_in, running_front
from tests.harness.http_model_server import quick
from tests.harness.panic import Panic
from tests.harness.processes import wait_until
from tests.harness.tasks import running_task
from tests.invariants.picker import check_picker
from tests.unit.sources.kvevents.a_language import write_language
from tests.unit.sources.kvevents.routed import NoLanguage

A, B = EndpointName("a"), EndpointName("b")


class Publisher:
    """Publishes a server's events, frame by frame."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._socket = context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._number = 0

    def send(self, *events: object, topic: bytes = b"kv") -> None:
        payload = msgspec.msgpack.encode([0.0, list(events), 0])
        self.send_frames(topic, self._number.to_bytes(8, "big"), payload)
        self._number += 1

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = Publisher(context)
    yield publisher
    publisher.close()
    context.term()


def block_removed(block: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU"}


class FollowedAddresses:
    """A picker, and the service that follows the servers at these addresses for it."""

    def __init__(self, exact: Callable[[], Exact], *, topic: str, **addresses: str) -> None:
        self.queue = RoutedPrompts(max_prompts=10, max_bytes=10**6)
        self.picker = Picker(DEFAULT_POLICY, rng=random.Random(1))
        self.picker.subscribe(self.queue.on_event)
        endpoints = [
            Endpoint(EndpointName(name), Address("127.0.0.1", n), kv_events=address)
            for n, (name, address) in enumerate(addresses.items(), 1)
        ]
        self.picker.news.set_endpoints(endpoints, now=0.0)
        self.service = ExactService(self.picker, self.queue, exact, ExactMode(models=(), topic=topic))
        self.service.set_endpoints(endpoints)

    def pick(self, text: str) -> EndpointName:
        """Pick for a request that is answered at once."""
        body = json.dumps({"model": "m", "prompt": text}).encode()
        request = Question(
            request_id="x",
            inference=parse_request("/v1/completions", body),
            body_bytes=len(body),
            subset=None,
        )
        pick = self.picker.pick(request, now=1.0)
        self.picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=1.0)
        self.picker.end(pick, outcome="ended", now=1.0)
        return pick.decision.chosen

    def state(self, name: EndpointName) -> str:
        status = self.service.status.servers.get(name)
        return status.state if status is not None else ""

    def events(self, name: EndpointName) -> int:
        status = self.service.status.servers.get(name)
        return status.events if status is not None else 0


@contextlib.asynccontextmanager
async def following_addresses(
    exact: Callable[[], Exact], *, topic: str = "kv", pause_s: float = 600.0, **addresses: str
) -> AsyncIterator[FollowedAddresses]:
    parts = FollowedAddresses(exact, topic=topic, **addresses)
    keep = Sources(rng=random.Random(1), first_pause_s=pause_s).keep
    async with running_task(lambda: keep("exact", parts.service.run), name="exact mode"):
        yield parts


def an_exact() -> Exact:
    return Exact({"": ModelSettings(language=NoLanguage())}, max_blocks=1000, max_chunks=1000)


class FailingExact(Exact):
    """Fails at the first message with an error that nobody expected."""

    def __init__(self, error: BaseException) -> None:
        super().__init__({"": ModelSettings(language=NoLanguage())}, max_blocks=1000, max_chunks=1000)
        self._error = error

    def apply(self, server: EndpointName, steps: Sequence[Step], *, complete: bool, now: float) -> None:  # type: ignore[override]  # the service hands over lists
        if steps:
            raise self._error
        super().apply(server, steps, complete=complete, now=now)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("by zero"), RecursionError(), MemoryError(), Panic("panicked")]
)
async def test_an_unexpected_error_turns_exact_mode_off_and_is_logged(
    publisher: Publisher, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    async with following_addresses(lambda: FailingExact(error), a=publisher.address) as parts:
        parts.pick("kept until the thread looks at it " * 20)

        def is_off() -> bool:
            publisher.send(block_removed(1))
            return any(model.state == "off" for model in parts.service.status.models.values())

        await wait_until(is_off, what="exact mode is off")
        (model,) = parts.service.status.models.values()
        assert model.reason.startswith(f"failed: {type(error).__name__}")
        assert all(server.state == "off" for server in parts.service.status.servers.values())
        await wait_until(
            lambda: any(r.levelname == "ERROR" for r in caplog.records), what="the failure is logged"
        )
        logged = [r for r in caplog.records if r.levelname == "ERROR"]
        assert ["exact mode failed and starts again" in r.getMessage() for r in logged] == [True]
        assert logged[0].exc_info is not None

        for n in range(20):  # The picker goes on, and keeps no more prompts than it may.
            parts.pick(f"{n} and so on " * 40)
        assert parts.service.status.dropped_prompts == 10
        assert parts.picker.caches.table.match(
            parts.picker.caches.chain(
                parse_request(
                    "/v1/completions", json.dumps({"model": "m", "prompt": "0 and so on " * 40}).encode()
                )
            )
        ).keys() == {A}
        check_picker(parts.picker)


async def test_exact_mode_that_cannot_start_shows_why(publisher: Publisher) -> None:
    def failing() -> Exact:
        raise OSError(24, "Too many open files")

    async with following_addresses(failing, a=publisher.address) as parts:
        await wait_until(lambda: bool(parts.service.status.models), what="the status says it")
        assert parts.service.status.models[""].reason == "failed: OSError: [Errno 24] Too many open files"


async def test_exact_mode_that_failed_starts_again_knowing_nothing(publisher: Publisher) -> None:
    made = iter([FailingExact(ZeroDivisionError("by zero"))])
    async with following_addresses(
        lambda: next(made, None) or an_exact(), pause_s=0.01, a=publisher.address
    ) as parts:

        def follows_again() -> bool:
            publisher.send(block_removed(1))
            return next(made, None) is None and parts.events(A) > 0 and parts.state(A) != "off"

        await wait_until(follows_again, what="exact mode follows the server again")
        parts.pick("held for the thread " * 20)
        await wait_until(lambda: not parts.queue.held_bytes, what="the prompts are looked at again")
        check_picker(parts.picker)


async def test_exact_mode_is_off_only_for_a_server_that_cannot_be_listened_to(publisher: Publisher) -> None:
    async with following_addresses(an_exact, a=publisher.address, b="tcp://127.0.0.1") as parts:

        def a_is_heard() -> bool:
            publisher.send(block_removed(1))
            return parts.events(A) > 0

        await wait_until(a_is_heard, what="the other server is followed")
        assert parts.state(B) == "off"
        reason = parts.service.status.servers[B].reason
        assert reason == "cannot receive events: tcp://127.0.0.1: Invalid argument"
        parts.service.set_endpoints([])
        await wait_until(lambda: parts.service.status.servers == {}, what="both servers have gone")


@pytest.mark.core
@pytest.mark.envoy
async def test_the_gateway_with_the_section_follows_its_server(tmp_path: Path) -> None:
    """The gateway runs as an operator would run it: files for configuration, endpoints and tokenizer, and
    Envoy in front.
    """
    folder = write_language(tmp_path / "model")
    settings = quick(
        num_blocks=96,  # 1,536 tokens, which are fewer than three prompts of this test
        block_size_tokens=16,
        kv_events=KvEventSettings(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0"),
    )
    server = Server(settings)
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(listening(server, settings))
        publisher = server.kv_publisher
        assert publisher is not None
        config = config_in(tmp_path, exactMode={"models": [{"tokenizerFolder": str(folder)}]})
        entry = {"name": "a", "address": f"127.0.0.1:{port}", "kv_events": publisher.endpoint}
        entry["kv_replay"] = publisher.replay_endpoint or ""
        Path(config.endpoints_file).write_text(json.dumps({"endpoints": [entry]}))
        front = running_front(config, directory=tmp_path, servers=[entry["address"]])
        picker, _, client = await stack.enter_async_context(front)

        others = await stack.enter_async_context(http_client(f"http://127.0.0.1:{port}"))

        async def complete(seed: int, *, by: Client = client) -> None:
            tokens = [random.Random(seed).randrange(50_000) for _ in range(600)]
            body = json.dumps({"model": "made-up", "prompt": tokens, "max_tokens": 2}).encode()
            reply = await by.request("POST", "/v1/completions", body=body)
            assert reply.status == 200, reply.body

        async def learned() -> bool:
            states = [await picker.metric("epp_exact_model", state=state) for state in ("checking", "on")]
            return any(value > 0 for value in states)

        await complete(1)
        await wait_until(learned, what="the first event is read")
        await complete(1)  # the first one may have come before the event
        await picker.wait_metric("epp_exact_model", at_least=1, state="on")
        await picker.wait_metric("epp_exact_endpoint", at_least=1, state="following")
        for seed in range(2, 6):  # More than the cache can hold, and the picker sees none of them.
            await complete(seed, by=others)
        await picker.wait_metric("epp_exact_corrections_total", at_least=1, kind="forgotten")
        assert await picker.metric("epp_exact_prompts_total", result="missed") == 0
