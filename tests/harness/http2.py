"""An HTTP/2 client in clear text, by prior knowledge: many requests on one connection, and pings when a test
wants.

aiohttp supports only HTTP/1.1. Flow control is answered at once. Request bodies must fit the first window (64
KB).
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions


@dataclass(slots=True)
class Http2Stream:
    """One request and its answer."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    error: str = ""
    """The reason why the stream was cut, or an empty text."""
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def status(self) -> int:
        """The status of the answer. It is 0 until the answer's headers came."""
        return int(self.headers.get(":status", "0"))


class Http2Client:
    """One connection. Made by `http2_client`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, authority: str) -> None:
        self._reader = reader
        self._writer = writer
        self._authority = authority
        self._connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._streams: dict[int, Http2Stream] = {}
        self.pongs = 0
        self.goaway = ""
        """The last message of the other side when it closed. Empty: it did not close."""
        self._connection.initiate_connection()
        self._flush()

    def complete(
        self, prompt: str = "hello", *, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> Http2Stream:
        """Start POST /v1/completions."""
        body = json.dumps({"model": "m", "prompt": prompt, **fields}).encode()
        number = self._connection.get_next_available_stream_id()
        stream = self._streams[number] = Http2Stream()
        named = {
            ":method": "POST",
            ":path": "/v1/completions",
            ":scheme": "http",
            ":authority": self._authority,
            "content-type": "application/json",
            **(headers or {}),
        }
        self._connection.send_headers(number, list(named.items()))
        self._connection.send_data(number, body, end_stream=True)
        self._flush()
        return stream

    def ping(self) -> None:
        self._connection.ping(b"12345678")
        self._flush()

    async def ping_every(self, interval_s: float) -> None:
        """Send pings without end."""
        while True:
            self.ping()
            await asyncio.sleep(interval_s)

    async def read(self) -> None:
        """Read until the connection closes."""
        try:
            while data := await self._reader.read(65536):
                for event in self._connection.receive_data(data):
                    self._take(event)
                self._flush()
        except (h2.exceptions.ProtocolError, OSError) as error:
            self.goaway = f"no HTTP/2 on the other side: {error}"
        for stream in self._streams.values():
            if not stream.over.is_set():
                self._end(stream, error=self.goaway or "connection closed")

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ConnectionTerminated):
            self.goaway = f"{event.error_code}: {event.additional_data!r}"
        elif isinstance(event, h2.events.PingAckReceived):
            self.pongs += 1
        stream = self._streams.get(getattr(event, "stream_id", None) or 0)
        if stream is None:
            return
        if isinstance(event, h2.events.ResponseReceived):
            stream.headers = {str(name): str(value) for name, value in event.headers or []}
        elif isinstance(event, h2.events.DataReceived):
            stream.body += event.data or b""
            self._connection.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            self._end(stream)
        elif isinstance(event, h2.events.StreamReset):
            self._end(stream, error=f"reset {event.error_code}")

    def _end(self, stream: Http2Stream, *, error: str = "") -> None:
        stream.error = error
        stream.over.set()

    def _flush(self) -> None:
        self._writer.write(self._connection.data_to_send())


@asynccontextmanager
async def http2_client(address: str) -> AsyncIterator[Http2Client]:
    """Yield a client that is connected to `ip:port`."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    client = Http2Client(reader, writer, authority=address)
    reading = asyncio.create_task(client.read(), name="http2 reader")
    try:
        yield client
    finally:
        reading.cancel()
        writer.close()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await reading
        with contextlib.suppress(OSError):
            await writer.wait_closed()
