"""Makes HTTP sessions for rare requests to model servers, with their API key if they want one, and texts that
say why such a request failed. Called by `model_lists`, `probes` and `scraper`.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from pathlib import Path
from typing import Final

import aiohttp

_log = logging.getLogger(__name__)
_MOST_KEY_BYTES: Final = 4096
_KEY: Final = re.compile(rb"[!-~]+")
_HEADERS: Final = {
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    "User-Agent": "prefix-gateway-epp",
}
_READ_BYTES: Final = 8 * 2**10
"""Bytes that the kernel holds for one connection (it doubles this number). One turn of the loop reads no more
than that. A server that sends nothing but `100 Continue` costs 1.3 us a byte: 256 KiB of this held the loop
for 0.35 s."""

_PLAIN: Final = "; if it expects TLS: model servers are reached by plain HTTP"
_TLS_ALERT: Final = re.compile(r"\\+x15\\+x03")
"""How an error quotes the first bytes of the alert that a server with TLS sends on plain HTTP."""


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _READ_BYTES)
    return made


def in_words(error: Exception) -> str:
    """Return why a question failed, on one line, and without text of any length: some errors quote the
    server.
    """
    if isinstance(error, aiohttp.ClientConnectorError):
        # aiohttp's own text speaks of ssl on every connection.
        why = os.strerror(error.errno) if error.errno else str(error.os_error)
        text = f"cannot connect to port {error.port}: {why}"
    elif isinstance(error, (aiohttp.ServerDisconnectedError, ConnectionResetError)):
        text = f"the server ended the connection without an answer{_PLAIN}"
    else:
        quoted = str(error)
        whose = "" if type(error).__module__.startswith("epp.") else f"{type(error).__name__}: "
        text = f"{whose}{quoted}{_PLAIN if _TLS_ALERT.search(quoted) else ''}"
    return " ".join(text.split())[:300]


class ApiKey:
    """The API key of the model servers, in a file. The file is read at each question, so a renewed key is
    used. Neither the log nor an error shows the key.
    """

    def __init__(self, path: str) -> None:
        """path: empty if the servers want no key."""
        self._path = path
        self._fault = ""

    def fault(self) -> str:
        """Return what is wrong with the file. Empty: nothing."""
        return self._read()[1] if self._path else ""

    def headers(self) -> dict[str, str]:
        """Return the header of a question, which has the key. Empty: the servers want none, or the file
        cannot be used.
        """
        key, fault = self._read() if self._path else ("", "")
        if fault and fault != self._fault:
            _log.error("model servers are asked without a key: models.apiKeyFile: %s", fault)
        self._fault = fault
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _read(self) -> tuple[str, str]:
        try:
            with Path(self._path).open("rb") as file:
                key = file.read(_MOST_KEY_BYTES + 1).strip()
        except OSError as error:
            return "", f"{self._path}: {error.strerror}"
        if len(key) > _MOST_KEY_BYTES or not _KEY.fullmatch(key):
            return "", f"{self._path}: the file has to hold one key of printable ASCII, and nothing else"
        return key.decode(), ""


def session_for_questions(*, timeout_s: float) -> aiohttp.ClientSession:
    """Return a session that asks for JSON, keeps no connection open, ignores proxies of the environment, and
    unpacks no answer. So an answer of any unpacked size stays bounded.

    timeout_s: for each question with its answer. The connection must be there after half of this time.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_socket),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=_HEADERS,
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=timeout_s / 2),
        trust_env=False,
    )


async def bounded_body(response: aiohttp.ClientResponse, *, most_bytes: int) -> bytes | None:
    """Return the body of an answer. None: the body is longer than `most_bytes`."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > most_bytes:
            response.close()
            return None
    return bytes(body)
