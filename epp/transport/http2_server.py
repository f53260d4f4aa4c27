"""Serves our own HTTP/2 on TCP, unix sockets and TLS: opens the socket, reads the certificates, and makes a
`Peer` for each connection. If the address cannot be used, the error says what to do.

Owns the connections and their shared parts: the services, the limits, the count of held bytes, and the order
of turns. If there are too many connections, idle ones give way to newcomers. If too many answers wait unread,
the connection with most of them is closed. The files of the certificates are read again when they change. If
they do not belong together (in the middle of a renewal), the old certificates stay in use.
"""

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from epp.base.errors import ConfigError, to_do
from epp.config.sections import Listen, Tls
from epp.protocol.calls import Service
from epp.transport.accepting import Acceptor, listener_at
from epp.transport.http2.frames import Limits
from epp.transport.http2.messages import HeldBytes
from epp.transport.peer import Peer
from epp.transport.turns import AddressTurns, Turns

_log = logging.getLogger(__name__)

_MAX_PEERS: Final = 4096
_RESERVED_FILES: Final = 256
"""File descriptors that are not given to connections. They are for scrapes, pages, the API server and other
pickers.
"""
_BACKLOG: Final = 1024
SOCKET_MODE: Final = 0o666
_TICK_S: Final = 0.5
_CHECKED_AT_ONCE: Final = 64
"""Peers whose time limits are checked in a turn of the event loop. One takes 4 us."""
_HANDSHAKE_S: Final = 10.0
_HANDSHAKES: Final = 256
"""The most connections that are being accepted at once. The oldest of them gives way to a newcomer."""
_SHARE_OF_AN_ADDRESS: Final = 0.5
"""The most connections from one address, as a share of all. The workers of an Envoy share one address."""
_LAST_WORDS_S: Final = 0.25
"""The time that peers get at a stop to read our last frames, before we close their connections."""


class Http2Server:
    """Serves `services` by path from `start` to `stop`."""

    def __init__(
        self,
        services: Mapping[str, Service],
        *,
        limits: Limits,
        max_held_bytes: int,
        max_peers: int,
        clock: Callable[[], float],
        on_fault: Callable[[str], None],
    ) -> None:
        """`on_fault` is called with the reason of each fault of a peer."""
        self.services = services
        self.limits = limits
        self.held = HeldBytes(max_held_bytes)
        self.max_peers = max_peers
        self.peers: set[Peer] = set()
        self._sources: dict[str, AddressTurns] = {}
        self.now = clock
        self.fault = on_fault
        self.turns = Turns(clock)
        self._acceptor = Acceptor(
            self._welcome, has_room=self.make_room, most_arriving=_HANDSHAKES, on_fault=on_fault
        )
        self._certificates: Certificates | None = None

    async def start(self, listen: Listen) -> int:
        """Bind and serve. Return the port, or 0 for a unix socket. Raises ConfigError if the address or a
        certificate cannot be used.
        """
        self._certificates = None if listen.tls is None else Certificates(listen.tls)
        sock = bound(listen)
        self._acceptor.start(sock)
        self._tick()
        return 0 if sock.family == socket.AF_UNIX else int(sock.getsockname()[1])

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, ask peers to leave, and close the remaining connections after
        `grace_s`.
        """
        if not self._acceptor.listening:
            return
        await self._acceptor.stop()
        if grace_s > 0:
            for peer in list(self.peers):
                peer.leave()
            await self._until_gone(grace_s)
        for peer in list(self.peers):
            peer.close()
        await self._until_gone(_LAST_WORDS_S)
        for peer in list(self.peers):
            peer.abort()

    async def _until_gone(self, seconds: float) -> None:
        """Wait until every peer has closed its side, but no longer than the given time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.peers:  # noqa: ASYNC110 - peers say nothing when they are gone
                    await asyncio.sleep(0.01)

    def came(self, peer: Peer, address: str) -> AddressTurns:
        """Count a new connection from that address."""
        source = self._sources.setdefault(address, AddressTurns(address))
        source.guests.add(peer)
        self.peers.add(peer)
        return source

    def left(self, peer: Peer) -> None:
        """Forget a connection. Idempotent."""
        source = peer.source
        self.peers.discard(peer)
        source.guests.discard(peer)
        source.idle.pop(peer, None)
        if not source.guests and self._sources.get(source.address) is source:
            del self._sources[source.address]

    def too_much_unsent(self) -> None:
        """Close the connection for which most bytes wait, since too many wait for all."""
        max(self.peers, key=lambda peer: peer.connection.unsent).close(reason="answers_unread")

    def make_room(self, arriving: int, address: str) -> bool:
        """Return whether one more connection may come. If there are too many, the connection closes that has
        been idle longest, of the address that has most of the idle ones.
        """
        own = self._sources.get(address)
        if own is not None and address and len(own.guests) >= self.max_peers * _SHARE_OF_AN_ADDRESS:
            source = own
        elif len(self.peers) + arriving < self.max_peers:
            return True
        else:
            source = max(
                self._sources.values(), key=lambda source: len(source.idle), default=AddressTurns("")
            )
        if source.idle:
            next(iter(source.idle)).give_way()
            return True
        return False

    async def _welcome(self, sock: socket.socket) -> None:
        context = None if self._certificates is None else self._certificates.current()
        longest_s = None if context is None else _HANDSHAKE_S
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Peer(self), sock, ssl=context, ssl_handshake_timeout=longest_s
            )
        except OSError:  # ssl.SSLError and time-outs are OSErrors
            self.fault("tls_handshake" if context is not None else "accept_failed")
            raise

    def _tick(self) -> None:
        if self._acceptor.listening:
            asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        self.held.expire(began_before=self.now() - self.limits.message_s)
        self._check(list(self.peers))

    def _check(self, peers: list[Peer]) -> None:
        """Check the time limits of these peers, a few in each turn of the event loop."""
        now = self.now()
        for peer in peers[-_CHECKED_AT_ONCE:]:
            peer.tick(now=now)
        del peers[-_CHECKED_AT_ONCE:]
        if peers:
            asyncio.get_running_loop().call_soon(self._check, peers)


def max_peers() -> int:
    """Return the most connections at once. File descriptors remain for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_PEERS
    return max(1, min(_MAX_PEERS, soft - _RESERVED_FILES, max(soft // 2, 1)))


def bound(listen: Listen) -> socket.socket:
    """Return a listening socket. Raises ConfigError with the reason if it cannot listen."""
    address = listen.address
    try:
        if address.startswith("unix:"):
            return _bound_to_path(Path(address.removeprefix("unix:")))
        host, _, port = address.rpartition(":")
        return listener_at(host.strip("[]"), int(port), backlog=_BACKLOG)
    except OSError as error:
        hint = "is another picker running?" if error.errno == errno.EADDRINUSE else "choose another"
        raise ConfigError(f"listen.address: cannot listen on {address}: {error.strerror}; {hint}") from error


def _bound_to_path(path: Path) -> socket.socket:
    if not path.parent.is_dir():
        raise ConfigError(
            f"listen.address: unix:{path}: the folder {path.parent} does not exist; create it, or correct "
            "the path"
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.stat().st_mode):
                path.unlink()  # left behind by an earlier process
        sock.bind(str(path))
        # The socket is made under the umask, and often gets the mode 0755. Then a data plane that runs as
        # another user could not connect, and would go on without the picker.
        path.chmod(SOCKET_MODE)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


class Certificates:
    """Holds the TLS context from the last time when the files fitted together."""

    def __init__(self, tls: Tls) -> None:
        """Read the files. Raises ConfigError if they cannot be used."""
        self._tls = tls
        self._files = [Path(p) for p in (tls.cert_file, tls.key_file, tls.client_ca_file) if p]
        self._seen: list[tuple[int, int, int]] = []
        try:
            self._renew()
        except ssl.SSLError as error:
            raise ConfigError(
                f"listen.tls: {tls.cert_file}, {tls.key_file}: {error.reason or error}"
            ) from error
        except OSError as error:
            raise ConfigError(f"listen.tls: {error.filename}: {error.strerror}; {to_do(error)}") from error

    def current(self) -> ssl.SSLContext:
        """Return the context, made anew if the files have changed."""
        try:
            if self._renew():
                _log.info("certificates were renewed: %s", self._tls.cert_file)
        except OSError as error:  # ssl.SSLError is an OSError
            _log.warning("the new certificates cannot be used; the old ones stay in use: %s", error)
        return self._latest

    def _renew(self) -> bool:
        """Read the files if they have changed. Returns whether they have. Raises OSError or ssl.SSLError."""
        stats = [path.stat() for path in self._files]
        stamp = [(s.st_mtime_ns, s.st_ino, s.st_size) for s in stats]
        if stamp == self._seen:
            return False
        self._latest, self._seen = self._context(), stamp
        return True

    def _context(self) -> ssl.SSLContext:
        """Return a context. Clients must show a certificate if a client CA is configured."""
        for path in self._files:
            path.read_bytes()  # the error of ssl itself does not name the file
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        context.load_cert_chain(self._tls.cert_file, self._tls.key_file)
        if self._tls.client_ca_file:
            context.verify_mode = ssl.CERT_REQUIRED
            # gRPC does the same: the file may hold an intermediate authority, or one client's certificate.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.load_verify_locations(self._tls.client_ca_file)
        return context
