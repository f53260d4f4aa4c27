"""Reads the servers that `epp up` is given, and finds their addresses.

A server is `10.0.0.1:8000`, `vllm-a:8000`, or a URL. A name may have several addresses, and each of them is a
model server of its own. `up` calls this module.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import yaml

from epp.base.errors import ConfigError
from epp.base.types import Address

_PORT: Final = 8000
"""vLLM listens here by default."""


class ServerName(NamedTuple):
    host: str
    port: int


def parsed(text: str) -> ServerName:
    """Read one server. Raise ConfigError, which says what to write."""
    is_url = "://" in text
    wanted = f"write HOST:PORT or http://HOST:PORT, such as 10.0.0.1:{_PORT}"
    try:
        url = urlsplit(text if is_url else f"http://{text}")
        host, port = url.hostname, url.port
    except ValueError as error:
        raise ConfigError(f"--server {text}: {wanted}") from error
    if url.scheme == "https":
        raise ConfigError(f"--server {text}: model servers are reached without TLS; {wanted}")
    if (
        not host
        or url.scheme != "http"
        or url.path.rstrip("/") not in ("", "/v1")
        or url.query
        or url.username
    ):
        raise ConfigError(f"--server {text}: {wanted}")
    return ServerName(host, port or (80 if is_url else _PORT))


async def addresses_of(server: ServerName) -> list[str]:
    """Return the IP addresses of a server, in order: those of IPv4 if there are any, because a name with both
    is one server. Raise OSError if its name has none.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
    hosts = {str(each[4][0]) for each in found}
    return sorted([host for host in hosts if ":" not in host] or hosts)


def endpoints_yaml(found: Iterable[tuple[ServerName, Iterable[str]]]) -> str:
    """Return the endpoints file: one endpoint for each address, named after the server."""
    entries: dict[str, dict[str, str]] = {}
    for server, hosts in found:
        for host in hosts:
            address = str(Address(host=host, port=server.port))
            name = address.replace("[", "").replace("]", "")
            shown = name if _is_address(server.host) else f"{server.host}/{name}"
            entries.setdefault(address, {"name": shown, "address": address})
    return yaml.safe_dump({"endpoints": list(entries.values())}, sort_keys=False)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
