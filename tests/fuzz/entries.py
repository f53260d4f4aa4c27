"""The picker's entries that need no socket: bytes go straight into the code that the edge calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from epp import picker_events
from epp.config.policy import DEFAULT_POLICY, Policy, PolicySpec, load_policy
from epp.config.prefix import Table
from epp.decision import Pick, PickRequest
from epp.errors import ConfigError, PickError
from epp.extproc.codec import decode, encode
from epp.extproc.events import StreamProtocolError
from epp.extproc.reading import RESPONSE_NAMES, request_names
from epp.extproc.response import StreamSettings
from epp.extproc.stream import HttpStream
from epp.files.endpoints_file import load_endpoints
from epp.kube.api import Query
from epp.kube.discovery import Discovery, pool_ports
from epp.kube.live import Live
from epp.kube.objects import Pod, PolicyObject, Pool
from epp.kube.policies import PolicySet
from epp.kube.policy_status import desired
from epp.kube.reflector import Reflector, Source
from epp.kvevents.exact import Exact, ModelSettings
from epp.kvevents.sequence import Deliver, Forget
from epp.kvevents.sequence import Sequence as Messages
from epp.picker import Picker
from epp.picker_events import Ended, PickerEvent
from epp.scraping.metrics_page import MetricsError, parse_page
from epp.sharing.batches import (
    Batch,
    Began,
    Event,
    Flag,
    Held,
    MalformedError,
    Moved,
    Over,
    Restarted,
    pack_hashes,
)
from epp.sharing.batches import encode as packed
from epp.sharing.speaker import identity_of
from epp.types import Address, ApiKind, Endpoint, EndpointName, InferenceRequest
from tests.fuzz.entry import Entry
from tests.fuzz.trees import as_json, as_msgpack, as_yaml
from tests.unit.kube.objects import pod, policy, pool
from tests.unit.sharing.pickers import Replica, meet, text

DATA = Path(__file__).parents[1] / "contract" / "data"
_MOST_ENTRIES = 2_000
SMALL = msgspec.structs.replace(
    DEFAULT_POLICY, spec=msgspec.structs.replace(DEFAULT_POLICY.spec, table=Table(max_entries=_MOST_ENTRIES))
)
"""A table that is full soon, so that growth would show."""
A = EndpointName("a")


def small_picker() -> Picker:
    picker = Picker(SMALL, rng=random.Random(1))
    picker.set_endpoints([Endpoint(A, Address("10.0.0.1", 8000), model="m")], now=0.0)
    return picker


def one_pick(picker: Picker, *, now: float) -> None:
    """What came in has left a picker that picks, or says why not."""
    inference = InferenceRequest(kind=ApiKind.COMPLETIONS, model="m", prompt=b"some prompt " * 50)
    with contextlib.suppress(PickError):
        pick = picker.pick(PickRequest(request_id="r", inference=inference), now=now)
        picker.end(pick, outcome="ended", now=now)
    picker.housekeep(now=now)
    picker.check_integrity()


class OfBytes:
    """An entry whose input is no document."""

    documents: Sequence[object] = ()

    def encode(self, _: object, /) -> bytes:
        raise NotImplementedError


class MetricsPages(OfBytes):
    """A model server's page, scraped."""

    words: Sequence[bytes] = (
        *(
            b"vllm:num_requests_running",
            b"vllm:cache_config_info{",
            b'block_size="',
            b'num_gpu_blocks="',
            b"# TYPE ",
        ),
        *(
            b"vllm:lora_requests_info{",
            b'running_lora_adapters="',
            b"sglang:num_running_reqs 1\n",
            b"sglang:page_size 1e15\n",
        ),
    )

    def __init__(self) -> None:
        pages = [path.read_bytes() for path in sorted(DATA.glob("metrics_*.txt"))]
        self.seeds: Sequence[bytes] = [page[:3_000] for page in pages] + [SHORT_PAGE] * 3
        self._picker = small_picker()
        self._now = itertools.count(1.0)

    async def feed(self, data: bytes) -> bool:
        now = next(self._now)
        try:
            metrics = parse_page(data, scraped_at=now)
        except MetricsError:
            self._picker.observe(A, None, now=now)
            return False
        self._picker.observe(A, metrics, now=now)
        assert metrics.capacity_tokens is None or 0 < metrics.capacity_tokens <= 2**36
        assert len(metrics.active_adapters) <= 4_096
        return True

    async def check(self) -> None:
        one_pick(self._picker, now=next(self._now))


class EndpointsFile:
    """The endpoints file."""

    words: Sequence[bytes] = (
        b"endpoints:",
        b"name:",
        b"address:",
        b'"10.0.0.9:1"',
        b"adapters: [x]",
        b"kv_events: tcp://a:1",
    )

    def __init__(self) -> None:
        entries = [
            {"name": n, "address": f"10.0.0.{i}:8000", "model": "m", "adapters": ["x"]}
            for i, n in enumerate("abc")
        ]
        self.documents: Sequence[object] = [
            {"endpoints": entries},
            {"endpoints": [entries[0] | {"port": 1, "labels": {"zone": "b"}}]},
        ]
        self.seeds: Sequence[bytes] = [
            yaml.safe_dump({"endpoints": entries}).encode(),
            b'endpoints: [{name: a, address: "[fd00::1]:80", labels: {zone: b}, kv_events: tcp://10.0.0.1:5557}]\n',
            b"endpoints: []\n",
        ]
        self._picker = small_picker()
        self._now = itertools.count(1.0)

    def encode(self, document: object, /) -> bytes:
        return as_yaml(document)

    async def feed(self, data: bytes) -> bool:
        try:
            endpoints = load_endpoints(data, source="e.yaml")
        except ConfigError:
            return False
        self._picker.set_endpoints(endpoints, now=next(self._now))
        return True

    async def check(self) -> None:
        one_pick(self._picker, now=next(self._now))


class PolicyFile:
    """The policy file."""

    words: Sequence[bytes] = (
        b"spec:",
        b"rule: session",
        b"mode: DryRun",
        b"chunks: {sizeBytes: 16}",
        b"table: {}",
        b"load: {}",
    )

    def __init__(self) -> None:
        document = msgspec.yaml.encode(SMALL)
        self.documents: Sequence[object] = [msgspec.yaml.decode(msgspec.yaml.encode(SMALL))]
        self.seeds: Sequence[bytes] = [
            document,
            HEAD + b"spec: {rule: affinity, chunks: {sizeBytes: 512}}\n",
            HEAD,
        ]
        self._picker = small_picker()
        self._now = itertools.count(1.0)

    def encode(self, document: object, /) -> bytes:
        return as_yaml(document)

    async def feed(self, data: bytes) -> bool:
        try:
            policy: Policy = load_policy(data, source="p.yaml")
        except ConfigError:
            return False
        self._picker.set_policy(policy, now=next(self._now))
        self._picker.set_dry_run(policy)
        return True

    async def check(self) -> None:
        one_pick(self._picker, now=next(self._now))


class PeerBatches:
    """Batches of other pickers: from Redis, or from the workers' hub."""

    words: Sequence[bytes] = (b"\x95\x02", b"\x97\x01", b"\xc4\x08" + b"\1" * 8, b"other", b"third", bytes(8))

    def __init__(self) -> None:
        self._replica = Replica(1, policy=SMALL)
        self.documents: Sequence[object] = [
            msgspec.msgpack.decode(each) for each in (*spoken(), *hand_made(self._replica))
        ]
        self.seeds: Sequence[bytes] = [*spoken(), *hand_made(self._replica)]
        self._now = itertools.count(1.0, 0.01)

    def encode(self, document: object, /) -> bytes:
        return as_msgpack(document)

    async def feed(self, data: bytes) -> bool:
        try:
            self._replica.exchange.hear(data, now=next(self._now))
        except MalformedError:
            return False
        return True

    async def check(self) -> None:
        now = next(self._now)
        self._replica.exchange.expire(now=now)
        self._replica.picker.housekeep(now=now)
        self._replica.check()
        assert self._replica.exchange.listener.peers < 2_000


class StoredTables:
    """The table that Redis or the hub keeps for those who join."""

    words: Sequence[bytes] = PeerBatches.words

    def __init__(self) -> None:
        writer = Replica(7, policy=SMALL)
        for n in range(5):
            writer.end(writer.pick(text(f"t{n}", 2_000), now=1.0), now=1.0)
        storing = writer.exchange.writer()
        for _ in storing.portions():
            pass
        self._replica = Replica(1, policy=SMALL)
        (portions,) = msgspec.msgpack.decode(storing.data())
        self.documents: Sequence[object] = [list(map(msgspec.msgpack.decode, portions))]
        self.seeds: Sequence[bytes] = [storing.data()]
        self._now = itertools.count(1.0, 0.01)

    def encode(self, document: object, /) -> bytes:
        portions = list(map(as_msgpack, document)) if isinstance(document, list) else document
        return msgspec.msgpack.encode([portions])

    async def feed(self, data: bytes) -> bool:
        try:
            for _ in self._replica.exchange.load(data, now=next(self._now), age_s=0.5):
                pass
        except MalformedError:
            return False
        return True

    async def check(self) -> None:
        self._replica.picker.housekeep(now=next(self._now))
        self._replica.check()


class KvEvents:
    """A server's KV events, behind the order of its messages."""

    words: Sequence[bytes] = (
        b"BlockStored",
        b"BlockRemoved",
        b"AllBlocksCleared",
        b"medium",
        b"token_ids",
        b"\xa3GPU",
        b"\xa3CPU",
    )

    def __init__(self) -> None:
        batches = [
            [
                0.0,
                [
                    {
                        "type": "BlockStored",
                        "block_hashes": [1, 2],
                        "token_ids": list(range(8)),
                        "block_size": 4,
                        "medium": "GPU",
                    }
                ],
                0,
            ],
            [
                0.0,
                [["BlockStored", [3], 1, [1, 2, 3, 4], 4, None, "CPU"], ["BlockRemoved", [1], "GPU"]],
                None,
            ],
            [0.0, [{"type": "BlockRemoved", "block_hashes": [b"x" * 32]}, {"type": "AllBlocksCleared"}]],
        ]
        self.documents: Sequence[object] = batches
        self.seeds: Sequence[bytes] = [msgspec.msgpack.encode(batch) for batch in batches]
        self._exact = Exact(
            {"": ModelSettings(language=None)}, max_blocks=_MOST_ENTRIES, max_chunks=_MOST_ENTRIES
        )
        self._messages = Messages(replays=False)
        self._exact.add(A, model="m")
        self._picker = small_picker()
        self._now, self._number = itertools.count(1.0), itertools.count()

    def encode(self, document: object, /) -> bytes:
        return as_msgpack(document)

    async def feed(self, data: bytes) -> bool:
        before, now = self._exact.malformed, next(self._now)
        steps = self._messages.live(next(self._number), data)
        assert all(isinstance(step, Deliver | Forget) for step in steps)
        self._exact.heard(A, steps, complete=self._messages.complete, now=now)
        self._picker.take_in(self._exact.findings(now=now))
        return self._exact.malformed == before

    async def check(self) -> None:
        self._messages.check_integrity()
        self._exact.check_integrity()
        if (
            self._exact.servers()[A].state == "off"
        ):  # as by a server that says too much; the next process is heard anew
            self._exact.drop(A)
            self._exact.add(A, model="m")
        one_pick(self._picker, now=next(self._now))


class ClusterObjects:
    """Pods, pools and policies, as lists and as lines of a watch."""

    words: Sequence[bytes] = (
        *(
            b'"metadata":',
            b'"name":"a"',
            b'"resourceVersion":"7"',
            b'"spec":',
            b'"status":',
            b'"DELETED"',
            b'"ERROR"',
            b'"code":410',
        ),
        *(
            b'"podIP":"fd00::1"',
            b'"number":0',
            b'"generation":-1',
            b'"targetRef":',
            b'"lastAccepted":',
            b'"mode":"DryRun"',
        ),
    )

    def __init__(self) -> None:
        objects: list[Any] = [
            pod("a", "10.0.0.1"),
            pod("b", "fd00::1"),
            pool(),
            policy("p"),
            policy("q", mode="DryRun"),
        ]
        documents = [json.loads(msgspec.json.encode(each)) for each in objects]
        lines = [
            json.dumps({"type": kind, "object": d})
            for d in documents
            for kind in ("ADDED", "MODIFIED", "DELETED")
        ]
        pages = [json.dumps({"metadata": {"resourceVersion": "5"}, "items": [d]}) for d in documents]
        self.documents: Sequence[object] = [json.loads(each) for each in (*lines, *pages)]
        gone = json.dumps({"type": "ERROR", "object": {"code": 410, "message": "too old"}})
        self.seeds: Sequence[bytes] = [each.encode() for each in (*lines, *pages, gone)]
        self._discovery = Discovery(family="Primary", ports=(8000,))
        self._policies = PolicySet(pool="vllm")
        self._ports: tuple[int, ...] = ()
        self._picker = small_picker()
        self._now = itertools.count(1.0)

    def encode(self, document: object, /) -> bytes:
        return as_json(document)

    async def feed(self, data: bytes) -> bool:
        taken = False
        for kind, sink in (
            (Pod, self._discovery),
            (PolicyObject, self._policies),
            (Pool, _Pools(self._discovery)),
        ):
            for reader in (_Reader(page=data), _Reader(line=data)):
                taken |= await _follow(reader, kind, sink)
        return taken

    async def check(self) -> None:
        self._discovery.check_integrity()
        self._picker.set_endpoints(self._discovery.endpoints(), now=next(self._now))
        outcome = self._policies.resolve(default=SMALL, pool_exists=True)
        self._policies.check_integrity()
        for name, verdict in outcome.verdicts.items():
            before = self._policies.observed()[name]
            after = desired(verdict, before=before, live=Live([], 0, 0), hit_ratio=None, time_text="t")
            assert msgspec.json.encode(after)
        one_pick(self._picker, now=next(self._now))


class _Pools:
    """What the watch of the pool does with it."""

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery

    def replace(self, pools: Iterable[Pool]) -> None:
        for found in pools:
            self.put(found)

    def put(self, found: Pool) -> None:
        self._discovery.set_ports(pool_ports(found))

    def remove(self, _: Pool) -> None: ...


class _Reader:
    """An API server that says one thing, and then hangs."""

    def __init__(
        self, *, page: bytes = b'{"metadata":{"resourceVersion":"1"},"items":[]}', line: bytes = b""
    ) -> None:
        self._page: bytes | None = page
        self._line = line
        self.done = asyncio.Event()

    async def request(self, method: str, path: str, *, query: Query = ()) -> bytes:
        page, self._page = self._page, None
        if page is None:
            self.done.set()
            await asyncio.get_running_loop().create_future()
        assert page is not None
        return page

    async def watch(self, path: str, *, query: Query, idle_s: float) -> AsyncGenerator[bytes]:
        yield b""
        line, self._line = self._line, b""
        if line:
            yield line
        self.done.set()
        await asyncio.get_running_loop().create_future()


async def _follow(reader: _Reader, kind: Any, sink: Any) -> bool:
    """True: it was taken, and the watch goes on."""
    states: list[bool] = []
    reflector = Reflector(
        reader,
        Source(what="objects", kind=kind, path="/"),
        sink=sink,
        on_change=lambda: None,
        on_state=lambda _, answers: states.append(answers),
        rng=_NoPauses(),
    )
    task = asyncio.ensure_future(reflector.run())
    done = asyncio.ensure_future(reader.done.wait())
    await asyncio.wait((task, done), return_when=asyncio.FIRST_COMPLETED)
    done.cancel()
    reflector.check_integrity()
    ended = task.done()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert not ended
    return False not in states


class _NoPauses(random.Random):
    """So that a refused answer is asked for again at once."""

    def uniform(self, a: float, b: float) -> float:
        return 0.0


class ExtProcMessages(OfBytes):
    """The data plane's messages, through the codec into the state machine of a request."""

    words: Sequence[bytes] = (
        *(
            b":path",
            b"/v1/chat/completions",
            b"x-request-id",
            b"content-length",
            b"\x10\x01",
            b"\x5a\x02\x08\x02",
            b"\x42\x00",
        ),
        *(b'{"model":"m","prompt":"', b'"messages":', b'"cache_salt":"', b":status", b"text/event-stream"),
    )

    def __init__(self) -> None:
        self.seeds: Sequence[bytes] = talk()
        self._picker = small_picker()
        self._seen = _Seen()
        self._picker.subscribe(self._seen.hear)
        self._names = request_names(PolicySpec())
        self._now = itertools.count(1.0)
        self._stream = self._new_stream()
        self._messages = 0

    def _new_stream(self) -> HttpStream:
        self._messages = 0
        return HttpStream(
            self._picker,
            self._seen,
            settings=StreamSettings(scores_metadata=True),
            new_request_id=lambda: "made",
            timer=lambda: 0.0,
        )

    async def feed(self, data: bytes) -> bool:
        now = next(self._now)
        try:
            event = decode(data, names=self._names, response_names=RESPONSE_NAMES, first=self._stream.first)
            for action in self._stream.receive(event, now=now):
                assert encode(action)
        except StreamProtocolError:
            self._over(now=now)
            return False
        self._stream.check_integrity()
        self._messages += 1
        if self._stream.closed or self._messages > 6:
            self._over(now=now)
        return True

    def _over(self, *, now: float) -> None:
        self._stream.close(now=now)
        self._stream = self._new_stream()

    async def check(self) -> None:
        self._over(now=next(self._now))
        assert self._seen.open == 0
        assert all(state.in_flight == 0 for state in self._picker.fleet.states())
        one_pick(self._picker, now=next(self._now))


class _Seen:
    """Counts picks whose end nobody heard of."""

    open = 0

    def parsed(self, *, seconds: float, size_bytes: int) -> None: ...
    def picked(self, pick: Pick, *, seconds: float, trace: str = "") -> None: ...
    def refused(self, request_id: str, error: PickError, *, trace: str = "") -> None: ...
    def hear(self, event: PickerEvent) -> None:
        self.open += isinstance(event, picker_events.Began) - isinstance(event, Ended)

    def protocol_error(self, reason: str) -> None: ...


HEAD = b"apiVersion: prefix-gateway.dev/v1alpha1\nkind: PrefixRoutingPolicy\nmetadata: {name: p}\n"
SHORT_PAGE = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="4096"} 1.0
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="4",running_lora_adapters="x,y",waiting_lora_adapters=""} 1.7e9
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
"""


def spoken() -> list[bytes]:
    """What a real picker says."""
    one, other = Replica(8), Replica(9)
    meet([one, other], now=0.0)
    said: list[bytes] = []
    for n in range(4):
        pick = one.pick(text(f"s{n}", 1_500), now=1.0 + n)
        said += one.say(now=1.0 + n)
        one.end(pick, now=1.5 + n)
        said += one.say(now=1.5 + n)
    return said


def hand_made(replica: Replica) -> list[bytes]:
    """Batches that fit together, of every kind of event."""
    identity = identity_of(next(iter(replica.picker.fleet.states())))
    chain, last = pack_hashes([1, 2, 3]), pack_hashes([3])
    events: list[Event] = [
        Held(0, 0, b"", chain),
        Began(0, 0, 0, 9, 0, last, pack_hashes([4])),
        Moved(0, 0, 0, 9, 1, last, b""),
    ]
    batches = [
        Batch(b"other", 1, 0, Flag.FRESH, 1, [("a", identity), ("x", 0)], events),
        Batch(b"other", 2, 0, 0, 2, [], [Over(0, 0, 2), Restarted(0, 0)]),
        Batch(b"third", 1, 1, Flag.FRESH | Flag.JOINING, 0, [], []),
    ]
    return [packed(batch) for batch in batches]


def talk() -> list[bytes]:
    """The messages of one request, as Envoy sends them."""
    from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc  # noqa: PLC0415 - a second to import

    made = []
    for path in ("/v1/chat/completions", "/v1/completions", "/metrics"):
        head = ext_proc.ProcessingRequest()
        for key, value in ((":path", path), ("x-request-id", "r1"), ("content-type", "application/json")):
            head.request_headers.headers.headers.add(key=key, raw_value=value.encode())
        head.protocol_config.request_body_mode = 2
        made.append(head.SerializeToString())
    for body in (
        b'{"model":"m","messages":[{"role":"user","content":"hello"}],"stream":true}',
        b'{"model":"m","prompt":"hello hello hello","cache_salt":"x"}',
        b'{"model":"m","prompt":[1,2,3,4]}',
    ):
        message = ext_proc.ProcessingRequest()
        message.request_body.body = body
        message.request_body.end_of_stream = True
        made.append(message.SerializeToString())
    answer = ext_proc.ProcessingRequest()
    answer.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    made.append(answer.SerializeToString())
    return [bytes(each) for each in made]


ENTRIES: dict[str, Callable[[], Entry]] = {
    "ext_proc": ExtProcMessages,
    "metrics_page": MetricsPages,
    "endpoints_file": EndpointsFile,
    "policy_file": PolicyFile,
    "peer_batches": PeerBatches,
    "stored_table": StoredTables,
    "kv_events": KvEvents,
    "api_server": ClusterObjects,
}
