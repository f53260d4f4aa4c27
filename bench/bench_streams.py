"""Runs millions of ext_proc streams through the picker's own HTTP/2, in one process and without a socket.
Measures what a stream costs, and how much memory it leaves behind.

    python -m bench.bench_streams --thousands 100 [--kb 1] [--chunks 0] [--aborts 0.1] [--bare]

Every stream is one HTTP request as Envoy sends it: headers, body, the answer's headers, and the end, each in
a read of its own. Every prompt differs. Prints a line for each tenth of the run: CPU of a stream, the C heap
in use, resident memory, entries of the table. The last line shows how much each stream left behind since the
second tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import random
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from bench.bench_pick import picker_of_pods
from epp.config.listening import Listen
from epp.extproc.calls import Handler
from epp.extproc.health import Health
from epp.extproc.live_streams import LiveStreams
from epp.extproc.over_http2 import Http2Transport
from epp.extproc.peer import Call, Peer
from epp.extproc.stream_settings import StreamSettings
from epp.http2.frames import PREFACE, Code, Flag, Kind, Setting, frame, reset, settings, window_update
from epp.http2.headers import encode
from epp.serve import process
from epp.telemetry.decisions import DecisionRing
from epp.telemetry.metrics import Metrics
from epp.telemetry.picker_state import PickerStatus

_METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_CALL = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", _METHOD),
    (":authority", "picker"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)
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
    ("content-type", "text/event-stream"),
    ("x-envoy-upstream-service-time", "1"),
    ("date", "Mon, 01 Jan 2029 00:00:00 GMT"),
    ("server", "envoy"),
)
_NO_TABLE = b"\x20"
"""The bytes before the first header block. They say that the data plane has reduced its header table to size
0, as the picker's settings ask.
"""
_NUMBER = b"012345678901"
_WINDOW_BYTES = 2**30
_STEP_BYTES = 2**20
_PER_S = 4000
"""The number of streams that begin in a second of the picker's time."""
_ENDPOINTS = 4


class _Info(ctypes.Structure):
    """The structure of glibc's mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def heap_bytes() -> int:
    """Return the bytes in use in the C heap."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Info
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Pipe(asyncio.Transport):
    """Counts the bytes that the picker writes, and drops them."""

    written = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += len(data)

    def is_closing(self) -> bool:
        return False

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None: ...
    def abort(self) -> None: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class _Constant(Handler):
    """Answers each message of a call with the same bytes."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def message(self, data: bytes, *, now: float) -> None:
        self._call.send(b"\x0a\x00")

    def half_closed(self, *, now: float) -> None:
        self._call.end()

    def gone(self, *, now: float, broken: bool) -> None: ...


class StreamRig:
    """One picker, one connection to it, and the bytes that its data plane sends."""

    def __init__(self, *, size_bytes: int, chunks: int, bare: bool) -> None:
        self._now = 0.0
        self.picker = picker_of_pods(_ENDPOINTS)
        metrics = Metrics(decisions=DecisionRing(maxlen=1000), state=_nobody_asks)
        self.picker.subscribe(metrics.on_event)
        streams = LiveStreams(self.picker, settings=StreamSettings(), clock=self._clock)
        server: Any = Http2Transport(streams, Health(), listen=Listen()).server
        if bare:
            server.services = {_METHOD: _Constant}
        self.streams = streams
        self._pipe = _Pipe()
        self._peer = Peer(server)
        self._peer.connection_made(self._pipe)
        hello = settings([(Setting.HEADER_TABLE_SIZE, 0), (Setting.INITIAL_WINDOW_SIZE, _WINDOW_BYTES)])
        self._read(PREFACE + hello + frame(Kind.SETTINGS, flags=Flag.ACK) + window_update(0, _WINDOW_BYTES))
        self._number = -1
        self._seen = 0
        self._block = _NO_TABLE + encode(_CALL)
        duplex = bool(chunks)
        self._reads = [_data(m) for m in _messages(size_bytes, duplex=duplex)]
        self._reads += [_data(_piece(last=n == chunks - 1)) for n in range(chunks)]

    def serve(self, *, aborted: bool) -> None:
        """Serve one HTTP request from its headers to its end."""
        self._number += 2
        self._now += 1 / _PER_S
        number, read = self._number, self._read
        named = b"%012d" % number
        block, self._block = self._block, self._block.removeprefix(_NO_TABLE)
        opening = frame(Kind.HEADERS, block, flags=Flag.END_HEADERS, stream_id=number)
        first, body, *rest = self._reads
        read(opening + _on(first.replace(_NUMBER, named), number))
        read(_on(body.replace(_NUMBER, named), number))
        if aborted:
            read(reset(number, Code.CANCEL))
            return
        for part in rest:
            read(_on(part, number))
        read(frame(Kind.DATA, flags=Flag.END_STREAM, stream_id=number))
        if self._pipe.written - self._seen > _STEP_BYTES:
            read(window_update(0, self._pipe.written - self._seen))
            self._seen = self._pipe.written

    def open(self) -> int:
        """Return the number of streams and bookings that are left."""
        return len(self.streams.live) + sum(s.in_flight for s in self.picker.fleet.states())

    def _read(self, data: bytes) -> None:
        self._peer.data_received(data)

    def _clock(self) -> float:
        return self._now


def _messages(size_bytes: int, *, duplex: bool) -> Sequence[ext_proc.ProcessingRequest]:
    first, whole, answer = (ext_proc.ProcessingRequest() for _ in range(3))
    text = random.Random(1).randbytes(size_bytes // 2).hex().encode()[: max(0, size_bytes - 80)]
    body = b'{"model": "m", "messages": [{"role": "user", "content": "' + _NUMBER + text + b'"}]}'
    own = (
        ("content-length", str(len(body))),
        ("x-request-id", f"6b5c1f0e-0000-4000-8000-{_NUMBER.decode()}"),
    )
    for name, value in (*_REQUEST, *own):
        first.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    for name, value in _RESPONSE:
        answer.response_headers.headers.headers.add(key=name, raw_value=value.encode())
    first.protocol_config.request_body_mode = 4 if duplex else 2
    first.protocol_config.response_body_mode = 4 if duplex else 0
    whole.request_body.body = body
    whole.request_body.end_of_stream = True
    return first, whole, answer


def _piece(*, last: bool) -> ext_proc.ProcessingRequest:
    message = ext_proc.ProcessingRequest()
    message.response_body.body = (
        b'data: {"choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": null}]}\n\n'
    )
    message.response_body.end_of_stream = last
    return message


def _data(message: ext_proc.ProcessingRequest) -> bytes:
    """Return the bytes as one DATA frame of stream 0."""
    payload = message.SerializeToString()
    return frame(Kind.DATA, b"\0" + len(payload).to_bytes(4) + payload)


_pack_number = struct.Struct(">L").pack


def _on(data_frame: bytes, number: int) -> bytes:
    """Return the same frame on another stream."""
    return data_frame[:5] + _pack_number(number) + data_frame[9:]


def _nobody_asks() -> PickerStatus:
    raise AssertionError("no metrics page is read here")


def run(rig: StreamRig, *, streams: int, aborts: float, report: Callable[[str], None]) -> None:
    rng = random.Random(1)
    step = max(1, streams // 10)
    marks: list[tuple[int, int]] = []
    report(f"{'streams':>12} {'us each':>8} {'C heap MiB':>11} {'RSS MiB':>8} {'table':>9} {'left open':>9}")
    for done in range(step, step * 10 + 1, step):
        started = time.process_time_ns()
        for _ in range(step):
            rig.serve(aborted=rng.random() < aborts)
        took_us = (time.process_time_ns() - started) / step / 1000
        gc.collect()
        marks.append((heap_bytes(), resident_bytes()))
        report(
            f"{done:>12,} {took_us:>8.1f} {marks[-1][0] / 2**20:>11.2f} {marks[-1][1] / 2**20:>8.1f}"
            f" {rig.picker.table.entries:>9,} {rig.open():>9}"
        )
    grown = [(after - before) / (8 * step) for before, after in zip(marks[1], marks[-1], strict=True)]
    report(f"since the second tenth, bytes for each stream: C heap {grown[0]:.2f}, resident {grown[1]:.2f}")


async def _main(arguments: argparse.Namespace) -> None:
    rig = StreamRig(size_bytes=int(arguments.kb * 1000), chunks=arguments.chunks, bare=arguments.bare)
    process.tune()
    run(rig, streams=int(arguments.thousands * 1000), aborts=arguments.aborts, report=print_now)


def print_now(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--thousands", type=float, default=100, help="thousands of streams (default %(default)s)"
    )
    parser.add_argument("--kb", type=float, default=1, help="size of a request in KB (default %(default)s)")
    parser.add_argument(
        "--chunks",
        type=int,
        default=0,
        help="use FULL_DUPLEX_STREAMED, with this many chunks in each answer; 0: buffered (default %(default)s)",
    )
    parser.add_argument(
        "--aborts",
        type=float,
        default=0.1,
        help="share of the streams that are aborted (default %(default)s)",
    )
    parser.add_argument(
        "--bare", action="store_true", help="run only the transport, which answers with constants"
    )
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
