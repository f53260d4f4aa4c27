"""Follows the files of the configuration. `FileWatcher` passes on the content of one whenever it has changed.

It compares the content itself, four times a second. This notices renames, the symlink swaps of
mounted ConfigMaps and writes in place, on any file system and without a dependency, and costs only a few
reads of a small file. A change is passed on when two looks in a row see the same content, so a half-written
file is not used.

If content is refused, or the file cannot be read, the old content stays in use. The reason is logged once,
and the next different content is tried. Content that could not be used for the moment (OSError) is tried
again.

`CertificateWatch` checks whether a certificate and its key can be used: both can be read, they belong
together, and the certificate has not expired. A failed renewal does not show while the old pair is still in
use. Later every handshake fails. So it checks the files every few seconds, and an alert fires before that.
`serve.inputs`, `preflight` (`epp check`) and `up` call this module.
"""

import asyncio
import logging
import ssl
import time
from _ssl import _test_decode_cert  # type: ignore[attr-defined]  # typeshed lacks it; `ssl` shows dates of CA certificates only
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Generic, TypeVar

from epp.base.errors import ConfigError, to_do, usable
from epp.config.reading import paths_of
from epp.config.sections import Tls

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.25
_MAX_BYTES: Final = 16 * 2**20

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class FileWatcher(Generic[T]):
    """Calls `on_change` with the result of `parse` for each new content of `path`. A ConfigError refuses this
    content. An OSError postpones it.

    `parse` runs in a thread, because a long YAML file takes seconds, for which requests should not wait.
    `applied` is the content that was passed on last. Without `applied`, `on_change` gets the first content
    too.
    `on_result` is called after every attempt: True if the content was taken, False if it was refused or the
    file became unreadable.
    """

    path: Path
    _: KW_ONLY
    parse: Callable[[bytes], T]
    on_change: Callable[[T], None]
    on_result: Callable[[bool], None] = lambda _: None
    applied: bytes | None = None
    _glimpsed: bytes | None = None
    _refused: str = ""
    """Why the content that was passed on last is not in use."""
    fault: str = ""
    """Why the content of the file is not in use. Empty: it is."""

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_POLL_S)

    async def look(self) -> None:
        """Check the file once. A change is passed on at the second check that finds it."""
        glimpsed, self._glimpsed = self._glimpsed, None
        try:
            # The file is read in a thread, so that a network file system that hangs cannot stop the picks.
            content = await asyncio.to_thread(self._read)
        except OSError as error:
            self._report(
                f"{self.path} cannot be read; what was read before stays: {error.strerror}; {to_do(error)}"
            )
            return
        if content == self.applied:
            if self.fault != self._refused:
                self._report(self._refused, good="is in use again")
        elif content == glimpsed:
            await self._hand_over(content)
        else:
            self._glimpsed = content

    def _read(self) -> bytes:
        with self.path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise OSError(27, f"larger than {_MAX_BYTES} bytes")
        return content

    async def _hand_over(self, content: bytes) -> None:
        refused = ""
        try:
            self.on_change(await asyncio.to_thread(self.parse, content))
        except OSError as error:
            self._report(f"{self.path} has changed and cannot be used yet; will try again: {error}")
            return
        except ConfigError as error:
            refused = f"a change is refused, and the old content stays in use: {error}"
        self.applied, self._refused = content, refused
        self._report(refused, good="has changed and is in use")

    def _report(self, fault: str, *, good: str = "") -> None:
        """Pass on the result, and log it. A fault that lasts is reported once, not four times a second."""
        if fault and fault == self.fault:
            return
        self.fault = fault
        _log.log(logging.ERROR if fault else logging.INFO, "%s", fault or f"{self.path} {good}")
        self.on_result(not fault)


# -- certificates --------------------------------------------------------------------------------------------

_LOOK_S: Final = 10.0
_MOST_BYTES: Final = 2**20


def check_tls(tls: Tls, *, field: str, unix_now_s: float) -> None:
    """Check the configured certificates. Raise ConfigError, which names the field, the fault, and what
    to do.
    """
    for place, path in paths_of(tls, under=field):
        where = f"{place}: {path}"
        with usable(where), Path(path).open("rb") as file:
            text = file.read(_MOST_BYTES)
        if not place.endswith(".keyFile"):
            _check_certificates(text, where=where)
        if place.endswith(".certFile"):
            _check_expiry(path, where=where, unix_now_s=unix_now_s)
    try:
        # An empty passphrase keeps OpenSSL from asking for one on the terminal. A key with a passphrase is
        # then refused.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert_file, tls.key_file, password="")
    except ssl.SSLError as error:
        raise ConfigError(
            f"{field}.keyFile: {tls.key_file}: this key does not belong to certFile {tls.cert_file}, is not "
            "PEM, or has a passphrase; "
            "name the matching key, in PEM and without a passphrase"
        ) from error


def _check_certificates(text: bytes, *, where: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{where}: this file holds no certificate that can be read; it must be PEM, with the line BEGIN "
            "CERTIFICATE"
        ) from error


def _check_expiry(path: str, *, where: str, unix_now_s: float) -> None:
    """Check the first certificate, which is the server's own. A date that cannot be read is ignored."""
    try:
        until_s = ssl.cert_time_to_seconds(_test_decode_cert(path)["notAfter"])
    except (ssl.SSLError, ValueError, KeyError):
        return
    if until_s <= unix_now_s:
        until = datetime.fromtimestamp(until_s, UTC)
        raise ConfigError(f"{where}: the certificate expired at {until:%Y-%m-%d %H:%M} UTC; renew it")


@dataclass(slots=True, eq=False)
class CertificateWatch:
    """Looks whether the files of `listen.tls` can be used. Calls `on_result` after the first look, and after
    each change.
    """

    tls: Tls
    on_result: Callable[[bool], None]
    fault: str | None = None
    """Why handshakes fail. Empty: they do not. None: nobody has looked yet."""

    @property
    def path(self) -> str:
        return self.tls.cert_file

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        before, self.fault = self.fault, await asyncio.to_thread(self._look)
        if self.fault == before:
            return
        if self.fault:
            _log.error("%s", self.fault)
        elif before:
            _log.info("listen.tls can be used again")
        self.on_result(not self.fault)

    def _look(self) -> str:
        try:
            check_tls(self.tls, field="listen.tls", unix_now_s=time.time())
        except ConfigError as error:
            return f"TLS handshakes fail now, or will fail after the next start: {error}"
        return ""
