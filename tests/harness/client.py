"""Clients of the gateway: one request and its whole answer, or one answer piece by piece."""

import io
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

SERVED_BY: Final = "x-served-by"
"""Response header in which the harness's backends give their name."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def served_by(self) -> str:
        """Return the name of the backend. The name is empty if Envoy or the picker answered."""
        return self.headers.get(SERVED_BY, "")

    def json(self) -> Any:
        return json.loads(self.body)


class OpenReply:
    """An answer whose headers came. Its body is read as it comes."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.served_by = response.headers.get(SERVED_BY, "")

    async def piece(self) -> bytes:
        """Return the next piece, which is empty at the end. Raise aiohttp.ClientError if the answer
        was cut.
        """
        return await self._response.content.readany()

    async def rest(self) -> bytes:
        """Return everything that is still to come. Raise aiohttp.ClientError if the answer was cut."""
        pieces = []
        while data := await self.piece():
            pieces.append(data)
        return b"".join(pieces)

    def abort(self) -> None:
        """Close the answer's connection."""
        self._response.close()


class Client:
    """HTTP/1.1 to one address, without a limit on connections, with a timeout of 240 s. Made by
    `http_client`.
    """

    def __init__(self, session: aiohttp.ClientSession, *, url: str) -> None:
        self._session = session
        self.url = url

    async def request(
        self, method: str, path: str, *, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        data = None if body is None else io.BytesIO(body)  # aiohttp warns about large bodies as bytes
        async with self._session.request(method, self.url + path, data=data, headers=headers) as response:
            return Reply(response.status, response.headers, await response.read())

    async def get(self, path: str, *, headers: Mapping[str, str] | None = None) -> Reply:
        return await self.request("GET", path, headers=headers)

    async def complete(
        self, prompt: str = "hello", *, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> Reply:
        """Send POST /v1/completions."""
        return await self.request(
            "POST", "/v1/completions", body=_completion(prompt, fields), headers=_json_headers(headers)
        )

    @asynccontextmanager
    async def stream(
        self, prompt: str = "hello", *, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> AsyncIterator[OpenReply]:
        """Send POST /v1/completions with `stream`. Return after the answer's headers."""
        body = io.BytesIO(_completion(prompt, {"stream": True, **fields}))
        async with self._session.post(
            f"{self.url}/v1/completions", data=body, headers=_json_headers(headers)
        ) as response:
            yield OpenReply(response)

    @asynccontextmanager
    async def websocket(
        self, path: str, *, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        async with self._session.ws_connect(self.url + path, headers=headers) as socket:
            yield socket


@asynccontextmanager
async def http_client(url: str) -> AsyncIterator[Client]:
    connector = aiohttp.TCPConnector(limit=0, ssl=False)
    # A test holds two thousand answers until the last one has begun.
    timeout = aiohttp.ClientTimeout(total=240)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield Client(session, url=url)


def _completion(prompt: str, fields: Mapping[str, Any]) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt, **fields}).encode()


def _json_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    return {"content-type": "application/json", **(headers or {})}
