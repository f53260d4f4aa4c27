"""Measures what one request costs the picker's own code, without gRPC: from the bytes of three messages to
the bytes of the answers.

`python -m bench.bench_path`. The process does nothing else, so its caches are warm. Between Envoy
and a client the same code takes several times as long (`make bench-dataplane`). Prints the fifth and the
fiftieth percentile of the microseconds of CPU, over rounds.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterable, Sequence

from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from bench.dataplane.load import Prompts
from epp.base.types import Address, Endpoint, EndpointMetrics, EndpointName
from epp.config.policy import DEFAULT_POLICY
from epp.observe.telemetry.decisions import DecisionRing
from epp.observe.telemetry.metrics import Metrics
from epp.observe.telemetry.picker_state import PickerStatus
from epp.picker.gate import Gate
from epp.picker.picker import Picker
from epp.protocol.asking import request_names
from epp.protocol.codec import decode, encode
from epp.protocol.settings import StreamContext, StreamSettings
from epp.protocol.stream import HttpStream

FLEETS = (4, 100, 1000, 5000)
SIZES = (1_000, 40_000, 400_000)
_ROUNDS = 60
_REQUESTS = 20
"""The number of requests in a round. A round of one request would measure the clock."""
_REQUEST = (
    (":authority", "gateway"),
    (":path", "/v1/chat/completions"),
    (":method", "POST"),
    (":scheme", "http"),
    ("content-type", "application/json"),
    ("user-agent", "bench"),
    ("authorization", "Bearer none"),
    ("accept", "*/*"),
    ("x-forwarded-proto", "http"),
    ("x-forwarded-for", "127.0.0.1"),
)
_RESPONSE = (
    (":status", "200"),
    ("content-type", "application/json"),
    ("content-length", "200"),
    ("x-envoy-upstream-service-time", "1"),
    ("date", "Mon, 01 Jan 2029 00:00:00 GMT"),
    ("server", "envoy"),
)


def picker_of_pods(fleet: int) -> Picker:
    """Return a picker that has read one page from each server."""
    picker = Picker(DEFAULT_POLICY, rng=random.Random(1))
    names = [EndpointName(f"pod-{i}") for i in range(fleet)]
    picker.news.set_endpoints(
        [
            Endpoint(name, Address(f"10.0.{i // 250}.{i % 250 + 1}", 8000), model="m")
            for i, name in enumerate(names)
        ],
        now=0.0,
    )
    page = EndpointMetrics(
        scraped_at=0.0,
        running=3,
        waiting=0,
        kv_usage=0.0,
        capacity_tokens=400_000,
        block_size=16,
        prompt_tokens=0.0,
    )
    for name in names:
        picker.news.observe(name, page, now=0.0)
    return picker


class _Path:
    """Runs a picker and everything between the picker and the wire."""

    def __init__(self, fleet: int) -> None:
        self.picker = picker_of_pods(fleet)
        self._metrics = Metrics(decisions=DecisionRing(maxlen=1000), state=_nobody_asks)
        self.picker.subscribe(self._metrics.on_event)
        spec = DEFAULT_POLICY.spec
        self._names = request_names(spec)
        self._settings = StreamSettings(mode_override=False)
        self._gate = Gate(self.picker)
        self._answers = {str(e.address): answer_of(str(e.address)) for e in self.picker.news.endpoints()}

    def serve(self, messages: Sequence[bytes], *, now: float) -> None:
        """Serve one HTTP request from its first message to its end."""
        stream = HttpStream(
            StreamContext(
                self.picker,
                settings=self._settings,
                new_request_id=str,
                timer=time.perf_counter,
                gate=self._gate,
            )
        )
        for data in messages:
            self._receive(stream, data, now=now)
        if stream.pick is not None:
            self._receive(stream, self._answers[str(stream.pick.destinations[0])], now=now)
        self.picker.tidy(now=now)
        stream.close(now=now)

    def _receive(self, stream: HttpStream, data: bytes, *, now: float) -> None:
        event = decode(data, names=self._names)
        for action in stream.receive(event, now=now):
            encode(action)


def _nobody_asks() -> PickerStatus:
    raise AssertionError("no metrics page is read here")


def messages_of(prompts: Prompts, *, number: int) -> tuple[bytes, ...]:
    """Return the messages that Envoy sends of a request: its headers, and its body."""
    _, _, body = b"".join(prompts.next()).partition(b"\r\n\r\n")
    head, whole = ext_proc.ProcessingRequest(), ext_proc.ProcessingRequest()
    own = (("content-length", str(len(body))), ("x-request-id", f"6b5c1f0e-0000-4000-8000-{number:012d}"))
    _set_headers(head.request_headers, (*_REQUEST, *own))
    head.protocol_config.request_body_mode = 2  # BUFFERED
    whole.request_body.body = body
    whole.request_body.end_of_stream = True
    return head.SerializeToString(), whole.SerializeToString()


def answer_of(served: str) -> bytes:
    """Return the message with the headers of the answer, which names the server that gave it."""
    answer = ext_proc.ProcessingRequest()
    _set_headers(answer.response_headers, _RESPONSE)
    answer.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": served})
    data: bytes = answer.SerializeToString()
    return data


def _set_headers(part: ext_proc.HttpHeaders, headers: Iterable[tuple[str, str]]) -> None:
    for name, value in headers:
        part.headers.headers.add(key=name, raw_value=value.encode())


def _rounds(path: _Path, size: int) -> list[float]:
    """Return the microseconds of CPU for each request, in each round. The first round is a warm-up."""
    prompts = Prompts(size_bytes=size, chunks=1, seed=random.Random(size).getrandbits(32))
    took = []
    for number in range(_ROUNDS + 1):
        batch = [messages_of(prompts, number=number * _REQUESTS + n) for n in range(_REQUESTS)]
        started = time.process_time_ns()
        for n, messages in enumerate(batch):
            path.serve(messages, now=(number * _REQUESTS + n) / 1000)
        took.append((time.process_time_ns() - started) / _REQUESTS / 1000)
    return took[1:]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(f"{'endpoints':>9} {'prompt':>10} {'us p5':>10} {'us p50':>10}")
    for fleet in FLEETS:
        for size in SIZES:
            cuts = statistics.quantiles(_rounds(_Path(fleet), size), n=20)
            print(f"{fleet:>9} {size // 1000:>7} KB {cuts[0]:>10.0f} {cuts[9]:>10.0f}")


if __name__ == "__main__":
    main()
