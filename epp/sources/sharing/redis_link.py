"""Carries batches over Redis or Valkey: one bounded stream of batches for each channel.

It sends only commands that Redis 6.2 and every Valkey know: XADD, XREAD, XREVRANGE, SET, GET, PEXPIRE.
Redis's own clock gives the age of a batch: the ids of stream entries are its milliseconds, and each answer to
XADD shows the current time.

Where the pool has a key, pickers sign their batches, so that others who can write to the same Redis cannot
influence them. The signature covers the channel and the batch, but not the time. So someone who can write to
Redis can repeat an earlier batch of a picker, but cannot make a new one.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import redis.asyncio as aredis
from redis import exceptions
from redis._parsers import _AsyncRESP2Parser
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.driver_info import DriverInfo

from epp.config.sharing import Redis, RedisTarget, RedisTls
from epp.sources.sharing.batches import LinkError, Received

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
SIGNATURE_BYTES: Final = 16
_FIELD: Final = b"b"
_BLOCK_MS: Final = 1000
_TIMEOUT_S: Final = 3.0
"""Time limit of one command, including connecting. More than `_BLOCK_MS`."""
_READ_BATCHES: Final = 200
_STREAM_BATCHES: Final = 10_000
"""About how many batches the stream keeps. One holds the events of one picker in one flush interval."""
_KEEP_MS: Final = 3_600_000
"""An unused channel is deleted after this time."""
_RENEW_S: Final = 60.0
"""How often a picker that sends sets this time again."""
_START: Final = b"0-0"
_DRIVER: Final = DriverInfo()
"""What a client tells Redis of its library. Made once, since each one reads a file for redis-py's version."""
_MOST_VALUE_BYTES: Final = 2**20
"""Largest reply that is no list."""
_MOST_LIST_BYTES: Final = 64 * 2**20
"""Largest reply that is a list: as many batches as are read at once."""
_MOST_LINES: Final = 32_768
"""Most values and lists in one reply, which may be empty. Valkey describes its commands to a client of a
cluster in 12,500."""


class _BoundedParser(_AsyncRESP2Parser):
    """Bounds the size of one answer of Redis before it is read. Otherwise anyone who can write to Redis could
    fill this process's memory with one value of 512 MB, or hold it with an entry of a million empty fields.

    Redis states the size of each value before the value. A reply that exceeds a bound raises
    InvalidResponse, which ends its connection.
    """

    __slots__ = ("_left", "_lines")

    async def read_response(self, disable_decoding: bool = False) -> Any:  # noqa: FBT001, FBT002 - redis-py calls it
        self._left, self._lines = _MOST_VALUE_BYTES, 0
        return await super().read_response(disable_decoding=disable_decoding)

    async def _readline(self) -> bytes:
        line: bytes = await super()._readline()
        if not self._lines and line.startswith(b"*"):
            self._left = _MOST_LIST_BYTES
        self._lines += 1
        if self._lines > _MOST_LINES:
            raise exceptions.InvalidResponse(f"a reply has more than {_MOST_LINES} values")
        if self._lines % 256 == 0:
            await asyncio.sleep(0)  # what has come is read without a pause, in some 12 us a line
        return line

    async def _read(self, length: int) -> bytes:
        self._left -= length
        if self._left < 0:
            raise exceptions.InvalidResponse(f"a value of {length} bytes in a reply is too large to be read")
        value: bytes = await super()._read(length)
        return value


_NO_NODE: Final = exceptions.RedisClusterException
"""No node of a cluster answers. redis-py derives it from no other error of its own."""
_REASONS: Final = (
    (exceptions.OutOfMemoryError, "full"),
    ((exceptions.AuthenticationError, exceptions.NoPermissionError), "auth"),
    ((TimeoutError, exceptions.TimeoutError, exceptions.BusyLoadingError), "timeout"),
    ((exceptions.ConnectionError, exceptions.ClusterError, _NO_NODE, OSError), "connection"),
)
"""Reasons of errors. The first that fits counts, since some of these classes derive from others."""


class _PasswordFile(CredentialProvider):
    """Reads the file at each connection, so a renewed password is used."""

    def __init__(self, *, username: str, password_file: str) -> None:
        self._username = username
        self._password_file = password_file

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = Path(self._password_file).read_text(encoding="utf-8").strip()
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


class Seal:
    """Signs batches with the key of the pool."""

    def __init__(self, key: bytes) -> None:
        self._key = hashlib.sha256(key).digest()

    def sign(self, batch: bytes | memoryview, *, channel: str) -> bytes:
        """Return the signature."""
        made = hashlib.blake2b(key=self._key, digest_size=SIGNATURE_BYTES, person=b"batch")
        made.update(f"{channel}\0".encode())
        made.update(batch)
        return made.digest()

    def opened(self, signed: bytes, *, channel: str) -> bytes | memoryview:
        """Return the batch without its signature. Empty, which is no batch: the signature is wrong."""
        signature, batch = signed[:SIGNATURE_BYTES], memoryview(signed)[SIGNATURE_BYTES:]
        if hmac.compare_digest(signature, self.sign(batch, channel=channel)):
            return batch
        _log.warning(
            "refused a batch of %d bytes: the pool's key did not sign it; do all pickers have the same sharing.redis.signingKeyFile?",
            len(batch),
        )
        return b""


class RedisLink:
    """A `batches.Link`."""

    def __init__(self, settings: Redis, *, seal: Seal | None = None) -> None:
        """seal: signs all batches, and refuses those that it did not sign."""
        self._settings = settings
        self._seal = seal
        self._clients: list[Any] = []
        """The client, which connects when it is first used, then the sentinels. redis-py's clients have no
        common type."""
        self._connects = 0
        """How often it has made clients."""
        self._channel = ""
        self._position = _START
        self._sent = _START
        """Id of the last batch that this picker sent."""
        self._ahead_ms = 0.0
        """Redis's clock minus ours."""
        self._renewed_at = float("-inf")
        """When the stream's end was last set."""
        self._unsure = False
        """Whether another Redis than before may answer the next call, or one that came back empty."""

    async def agree(self, pool: str, mine: bytes) -> bytes:
        key = f"prefix-gateway:{{{pool}}}:hash-secret"
        await self._call(lambda client: client.set(key, mine, nx=True, px=_KEEP_MS))
        found = await self._call(lambda client: client.get(key))
        await self._call(lambda client: client.pexpire(key, _KEEP_MS))
        return found if isinstance(found, bytes) else mine

    async def join(self, channel: str) -> None:
        self._channel, self._position, self._renewed_at = channel, _START, float("-inf")

    async def send(self, batch: bytes) -> None:
        if self._seal is not None:
            batch = self._seal.sign(batch, channel=self._channel) + batch
        entry = await self._call(
            lambda client: client.xadd(
                self._stream, {_FIELD: batch}, maxlen=_STREAM_BATCHES, approximate=True
            )
        )
        self._sent = entry
        now = time.monotonic()
        self._ahead_ms = _order(entry)[0] - now * 1000
        if now - self._renewed_at > _RENEW_S:
            await self._call(lambda client: client.pexpire(self._stream, _KEEP_MS))
            self._renewed_at = now

    async def read(self) -> list[Received]:
        if self._unsure:
            await self._recover()
        channel = self._channel
        try:
            answer = await self._call(
                lambda client: client.xread(
                    {self._stream: self._position}, count=_READ_BATCHES, block=_BLOCK_MS
                )
            )
        except LinkError as error:
            if error.reason == "refused" and _order(self._sent) > _order(self._position):
                # This skips the unreadable batch. Batches of others before this id are lost.
                self._position = self._sent
            raise
        entries = answer[0][1] if answer and channel == self._channel else []
        if entries:
            self._position = entries[-1][0]
        return [Received(self._batch_of(fields), self._age_s(entry)) for entry, fields in entries]

    async def close(self) -> None:
        """End all connections. The next call connects again."""
        clients, self._clients = self._clients, []
        await _end(clients)

    # -- parts -----------------------------------------------------------------------------------------------

    @property
    def _stream(self) -> str:
        return f"{self._channel}:stream"

    def _batch_of(self, fields: dict[bytes, bytes]) -> bytes | memoryview:
        batch = fields.get(_FIELD, b"")
        return batch if self._seal is None else self._seal.opened(batch, channel=self._channel)

    def _age_s(self, entry: bytes) -> float:
        return max(0.0, (time.monotonic() * 1000 + self._ahead_ms - _order(entry)[0]) / 1000)

    async def _recover(self) -> None:
        """Read on from the newest id, if it is smaller than the last id that we read. Otherwise `read` would
        wait for entries that cannot come.
        """
        entries = await self._call(lambda client: client.xrevrange(self._stream, count=1))
        self._position = min(self._position, entries[0][0] if entries else _START, key=_order)
        self._unsure = False

    async def _call(self, command: Callable[[Any], Awaitable[_T]]) -> _T:
        """Raises LinkError after every failure, and ends all connections: after a failover a replica may keep
        those that it had as the master.
        """
        clients: list[Any] = []
        try:
            if not self._clients:
                self._clients = _connect(self._settings, first=self._connects)
                self._connects += 1
            clients = self._clients
            async with asyncio.timeout(_TIMEOUT_S):
                return await command(clients[0])
        except (exceptions.RedisError, _NO_NODE, OSError, ValueError) as error:
            self._unsure = True
            if clients is self._clients:
                await self.close()
            reason = next((reason for kinds, reason in _REASONS if isinstance(error, kinds)), "refused")
            raise LinkError(f"{error}{_hint(error)}" or "no answer in time", reason=reason) from error
        finally:
            if clients is not self._clients:
                await _end(clients)  # they may have connected once more after they were closed


async def _end(clients: list[Any]) -> None:
    for client in clients:
        with contextlib.suppress(exceptions.RedisError, OSError, TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S):
                await client.aclose()


def _hint(error: Exception) -> str:
    if isinstance(error, exceptions.AskError):
        return " (a node of a cluster answers; write redis+cluster:// in sharing.redis.url)"
    if "unknown command" in str(error).lower():
        return " (if sentinels answer, write redis+sentinel://HOST:26379/MASTER in sharing.redis.url)"
    return ""


def _connect(settings: Redis, *, first: int) -> list[Any]:
    """first: the host that is asked first, modulo their number. A silent one takes all the time of a call, so
    the next clients have to begin with another.
    """
    target = RedisTarget.parse(settings.url)
    hosts = deque(target.hosts)
    hosts.rotate(-first)
    options: dict[str, Any] = {
        "socket_timeout": _TIMEOUT_S,
        "socket_connect_timeout": _TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "driver_info": _DRIVER,
        "credential_provider": _credentials(settings.username, settings.password_file),
    }
    tls = _tls(settings.tls) if target.tls else {}
    if target.kind == "single":
        host, port = hosts[0]
        return [_bounded(aredis.Redis(host=host, port=port, db=target.database, **options, **tls))]
    if target.kind == "cluster":
        nodes = [ClusterNode(host, port) for host, port in hosts]
        # One retry, because after a failover the first attempt only finds out where the slot is now.
        options["retry"] = Retry(NoBackoff(), 1)
        cluster = RedisCluster(startup_nodes=nodes, require_full_coverage=False, **options, **tls)
        cluster.connection_kwargs["parser_class"] = _BoundedParser
        return [cluster]
    sentinel = {
        **options,
        **tls,
        "credential_provider": _credentials(settings.sentinel_username, settings.sentinel_password_file),
    }
    master_of = Sentinel(hosts, sentinel_kwargs=sentinel, **options, **tls)  # type: ignore[no-untyped-call]  # redis-py
    return [_bounded(master_of.master_for(target.master, db=target.database)), *master_of.sentinels]


def _bounded(client: Any) -> Any:
    """Return the same client, with a bound on the size of replies."""
    client.connection_pool.connection_kwargs["parser_class"] = _BoundedParser
    return client


def _credentials(username: str, password_file: str) -> CredentialProvider | None:
    return _PasswordFile(username=username, password_file=password_file) if password_file else None


def _tls(tls: RedisTls) -> dict[str, Any]:
    return {
        "ssl": True,
        "ssl_ca_certs": tls.ca_file or None,
        "ssl_certfile": tls.cert_file or None,
        "ssl_keyfile": tls.key_file or None,
        "ssl_check_hostname": tls.check_hostname,
    }


def _order(entry: bytes) -> tuple[int, int]:
    """Return a stream entry's id as numbers that can be compared."""
    milliseconds, _, number = entry.partition(b"-")
    return int(milliseconds), int(number)
