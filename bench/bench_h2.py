"""Compares the picker's own HTTP/2 with the library `h2`: the CPU of one ext_proc call, and what one peer's
attack costs.

    python -m bench.bench_h2 [--rounds 9]

Both sides are driven in memory, without sockets. They get the same bytes, message by message as a data plane
sends them, and give the same answers. `h2` knows no gRPC, so its server here cuts messages out of DATA.
The attacks show how long one step holds the event loop: our own reads at most 16 steps between two looks at
the clock, and `h2` reads all bytes that it is given.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from epp.http2.call_events import HalfClosed, Message
from epp.http2.connection import Connection
from epp.http2.frames import Setting, settings
from epp.http2.limits import HeldBytes, Limits
from tests.harness.http2_frames import (
    NO_TABLE,
    block,
    continuation,
    data,
    grpc,
    headers,
    hello,
    ping,
    reset,
    window_update,
)

ANSWER: Final = bytes(150)
SAME_LIMITS: Final = {
    SettingCodes.INITIAL_WINDOW_SIZE: 2**20,
    SettingCodes.MAX_FRAME_SIZE: 2**20,
    SettingCodes.MAX_CONCURRENT_STREAMS: 10_000,
    SettingCodes.MAX_HEADER_LIST_SIZE: 16_384,
}
READ_BYTES: Final = 2**18
"""The most bytes that the event loop reads from a socket at once."""
Feed = Callable[[bytes], bytes]


def ours() -> tuple[Feed, Connection]:
    """Return a server on `epp.http2` that answers the first three messages and sends the others back."""
    connection = Connection(Limits(max_message_bytes=2**26), HeldBytes(2**28), now=0.0)
    seen: dict[int, int] = {}

    def feed(wire: bytes) -> bytes:
        for event in connection.receive(wire, now=0.0):
            if type(event) is Message:
                number = event.stream_id
                seen[number] = seen.get(number, 0) + 1
                connection.send(number, ANSWER if seen[number] <= 3 else event.data)
                if seen[number] == 3:
                    connection.reply(number, lambda data, at, end: data[at:end])
            elif type(event) is HalfClosed:
                connection.end(event.stream_id)
                seen.pop(event.stream_id, None)
        return connection.data_to_send()

    return feed, connection


def with_h2() -> tuple[Feed, H2Connection]:
    """Return the same server on `h2`."""
    connection = H2Connection(H2Configuration(client_side=False, header_encoding=None))
    connection.local_settings = Settings(client=False, initial_values=SAME_LIMITS)
    connection.max_inbound_frame_size = 2**20
    connection.initiate_connection()
    connection.increment_flow_control_window(2**24)
    parts: dict[int, bytes] = {}
    seen: dict[int, int] = {}

    def answer(number: int, message: bytes) -> None:
        seen[number] += 1
        if seen[number] == 1:
            connection.send_headers(number, [(":status", "200"), ("content-type", "application/grpc")])
        connection.send_data(number, grpc(ANSWER if seen[number] <= 3 else message))

    def feed(wire: bytes) -> bytes:
        for event in connection.receive_data(wire):
            if isinstance(event, RequestReceived):
                parts[event.stream_id], seen[event.stream_id] = b"", 0
            elif isinstance(event, DataReceived):
                number, part = event.stream_id, parts[event.stream_id] + event.data
                while len(part) >= 5 and len(part) >= (size := 5 + int.from_bytes(part[1:5])):
                    answer(number, part[5:size])
                    part = part[size:]
                parts[number] = part
                connection.acknowledge_received_data(event.flow_controlled_length, number)
            elif isinstance(event, StreamEnded) and event.stream_id in parts:
                connection.send_headers(event.stream_id, [("grpc-status", "0")], end_stream=True)
                del parts[event.stream_id], seen[event.stream_id]
        return connection.data_to_send()

    return feed, connection


def call(number: int, *, body_bytes: int, chunks: int) -> list[bytes]:
    """Return the reads of one call: its start, the body in frames, the answer's headers and chunks."""
    body = grpc(bytes(body_bytes))
    frames = [data(number, body[at : at + 16_384]) for at in range(0, len(body), 16_384)]
    first = NO_TABLE if number == 1 else b""
    return [
        headers(number, first + block()) + data(number, grpc(bytes(600))),
        b"".join(frames),
        data(number, grpc(bytes(300))),
        *[data(number, grpc(bytes(200)))] * chunks,
        data(number, ends=True),
    ]


def cost_us(make: Callable[[], tuple[Feed, Any]], *, body_bytes: int, chunks: int, calls: int) -> float:
    """Return the CPU of one call in microseconds."""
    feed, _ = make()
    feed(hello(window=2**24) + window_update(0, 2**30))
    scripts = [call(2 * n + 1, body_bytes=body_bytes, chunks=chunks) for n in range(calls)]
    began = time.process_time()
    for script in scripts:
        for wire in script:
            feed(wire)
    return (time.process_time() - began) / calls * 1e6


@dataclass(frozen=True)
class Attack:
    name: str
    wire: bytes
    before: bytes = b""


def in_16_frames(number: int) -> bytes:
    rest = continuation(number, b"", whole=False) * 14 + continuation(number, b"", whole=True)
    return headers(number, whole=False) + rest


def attacks() -> Iterator[Attack]:
    sizes = b"".join(headers(n, b"\x20" * 16_100 + block()) for n in range(1, 32, 2))
    yield Attack("16 header blocks of 16 KiB of size updates", sizes)
    streams = range(1, 20_000, 2)
    yield Attack("10,000 header blocks of 16 frames", b"".join(in_16_frames(n) + reset(n) for n in streams))
    yield Attack("rapid reset of 10,000 streams", b"".join(headers(n) + reset(n) for n in streams))
    yield Attack("100,000 PINGs", ping() * 100_000)
    yield Attack("10,000 SETTINGS", settings([(Setting.INITIAL_WINDOW_SIZE, 70_000)]) * 10_000)
    yield Attack("100,000 empty DATA frames", data(1) * 100_000, before=headers(1))
    yield Attack("200,000 empty messages", data(1, grpc(b"") * 50_000) * 4, before=headers(1))
    windows = b"".join(settings([(Setting.INITIAL_WINDOW_SIZE, 70_000 + n)]) for n in range(20))
    calls = b"".join(headers(n) + data(n, grpc(bytes(10))) for n in streams)
    yield Attack("20 SETTINGS that move 10,000 windows", windows, before=calls)


def held_ms(attack: Attack, *, own: bool) -> tuple[float, float, str]:
    """Return the longest step and the whole CPU of an attack in milliseconds, and how it ended."""
    feed, connection = ours() if own else with_h2()
    feed(hello() + window_update(0, 2**30) + attack.before)
    longest, whole, end = 0.0, 0.0, ""
    for at in range(0, len(attack.wire), READ_BYTES):
        wire = attack.wire[at : at + READ_BYTES]
        while not end and (wire or (isinstance(connection, Connection) and connection.pending)):
            began = time.process_time()
            try:
                if isinstance(connection, Connection):
                    connection.receive(wire, now=0.0, limit=16)
                    end = connection.over
                else:
                    connection.receive_data(wire)
                connection.data_to_send()
            except ProtocolError as error:
                end = str(error)[:60]
            step_ms = (time.process_time() - began) * 1e3
            longest, whole, wire = max(longest, step_ms), whole + step_ms, b""
    return longest, whole, end or "all was read"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each side (default 9)")
    rounds = parser.parse_args().rounds
    print("| body | chunks | own, us a call | h2, us a call | h2 / own |\n| --- | --- | --- | --- | --- |")
    for kib, chunks, calls in ((1, 1, 300), (1, 100, 60), (40, 1, 300), (40, 100, 60)):
        pairs = [
            [cost_us(make, body_bytes=kib * 1024, chunks=chunks, calls=calls) for make in (ours, with_h2)]
            for _ in range(rounds)
        ]
        own, other = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(theirs / mine for mine, theirs in pairs)
        print(f"| {kib} KB | {chunks} | {own:.0f} | {other:.0f} | {ratio:.1f} |")
    print("\n| attack | own: longest step, all (ms) | end | h2: longest step, all (ms) | end |")
    print("| --- | --- | --- | --- | --- |")
    for attack in attacks():
        cells = [held_ms(attack, own=own) for own in (True, False)]
        print(f"| {attack.name} |" + "".join(f" {a:.1f}, {b:.0f} | {end} |" for a, b, end in cells))


if __name__ == "__main__":
    main()
