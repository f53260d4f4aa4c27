"""Carries batches over Redis or Valkey: one bounded stream of batches and one stored table, both under the
name of the channel.

It sends only commands that Redis 6.2 and every Valkey know: XADD, XREAD, XREVRANGE, SET, GET, GETRANGE,
PEXPIRE. All keys of a channel share a hash tag, so a cluster keeps them on one node. Redis's own clock gives
the age of a batch: the ids of stream entries are its milliseconds, and each answer to XADD shows the current
time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import redis.asyncio as aredis
from redis import exceptions
from redis._parsers import _AsyncRESP2Parser
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

from epp.config.sharing import Redis
from epp.sources.sharing.link import Link, LinkError, Received
from epp.sources.sharing.signed import Seal
from epp.sources.sharing.tables import MOST_TABLE_BYTES

_T = TypeVar("_T")
_FIELD: Final = b"b"
_BLOCK_MS: Final = 1000
_TIMEOUT_S: Final = 3.0
"""Time limit of one command, including connecting. More than `_BLOCK_MS`."""
_READ_BATCHES: Final = 200
_STREAM_BATCHES: Final = 10_000
"""About how many batches the stream keeps. One holds the events of one picker in one flush interval."""
_KEEP_MS: Final = 3_600_000
"""An unused channel is deleted after this time."""
_START: Final = b"0-0"
_MOST_POSITION_BYTES: Final = 41
"""Longest id of a stream entry: two numbers of 64 bits."""
_READ_TABLE_TIMES: Final = 3
"""Tries to read a stored table. Another picker may store its own table meanwhile."""
MOST_PIECE_BYTES: Final = 2**20
"""The largest value that is requested: the stored table is read in pieces of this size."""
_MOST_LIST_BYTES: Final = 64 * 2**20
"""Largest reply that is a list: as many batches as are read at once."""


class _BoundedParser(_AsyncRESP2Parser):
    """Bounds the size of one answer of Redis before it is read. Otherwise anyone who can write to Redis could
    fill this process's memory with one value of 512 MB.

    Redis states the size of each value before the value. A reply that exceeds the bound raises
    InvalidResponse, which ends its connection.
    """

    __slots__ = ("_begun", "_left")

    async def read_response(self, disable_decoding: bool = False) -> Any:  # noqa: FBT001, FBT002 - redis-py calls it
        self._left, self._begun = MOST_PIECE_BYTES, False
        return await super().read_response(disable_decoding=disable_decoding)

    async def _readline(self) -> bytes:
        line: bytes = await super()._readline()
        if not self._begun and line.startswith(b"*"):
            self._left = _MOST_LIST_BYTES
        self._begun = True
        return line

    async def _read(self, length: int) -> bytes:
        self._left -= length
        if self._left < 0:
            raise exceptions.InvalidResponse(f"a value of {length} bytes in a reply is too large to be read")
        value: bytes = await super()._read(length)
        return value


_NOT_HERE: Final = (
    exceptions.ReadOnlyError,  # after a failover a replica may keep the connections that it had as the master
    exceptions.BusyLoadingError,
    exceptions.AskError,  # and MOVED: the server is a node of a cluster
    exceptions.ClusterError,  # CLUSTERDOWN and MASTERDOWN
    exceptions.AuthenticationError,
)
"""Answers that mean that this is not the right server, or not any more: another connection may reach it."""
_REASONS: Final = (
    (exceptions.OutOfMemoryError, "full"),
    ((exceptions.AuthenticationError, exceptions.NoPermissionError), "auth"),
    ((TimeoutError, exceptions.TimeoutError, exceptions.BusyLoadingError), "timeout"),
    ((exceptions.ConnectionError, exceptions.ClusterError, OSError), "connection"),
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


Clients = tuple[Any, list[Any]]
"""A client, which connects when it is first used, and the clients below it. redis-py's clients have no common
type."""


class RedisLink(Link):
    def __init__(
        self,
        settings: Redis,
        *,
        seal: Seal | None = None,
        clock: Callable[[], float] = time.monotonic,
        connect: Callable[[Redis], Clients] | None = None,
    ) -> None:
        """seal: signs all messages, and refuses those that it did not sign."""
        self._settings = settings
        self._seal = seal
        self._connect = connect or _connect
        self._clock = clock
        self._client: Any = None
        self._others: list[Any] = []
        """The clients below the first one: the sentinels."""
        self._channel = ""
        self._position = _START
        self._said = _START
        """Id of the last batch that this picker sent."""
        self._ahead_ms = 0.0
        """Redis's clock minus ours."""
        self._unsure = False
        """Whether another Redis than before may answer the next call, or one that came back empty."""

    async def agree(self, pool: str, mine: bytes) -> bytes:
        key = f"prefix-gateway:{{{pool}}}:hash-secret"
        await self._call(lambda client: client.set(key, mine, nx=True, px=_KEEP_MS))
        found = await self._call(lambda client: client.get(key))
        await self._call(lambda client: client.pexpire(key, _KEEP_MS))
        return found if isinstance(found, bytes) else mine

    async def join(self, channel: str) -> None:
        self._channel, self._position = channel, _START

    async def send(self, batch: bytes) -> None:
        if self._seal is not None:
            batch = self._seal.sign("batch", batch, channel=self._channel) + batch
        entry = await self._call(
            lambda client: client.xadd(
                self._stream, {_FIELD: batch}, maxlen=_STREAM_BATCHES, approximate=True
            )
        )
        self._said = entry
        self._ahead_ms = _order(entry)[0] - self._clock() * 1000

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
            if error.reason == "refused" and _order(self._said) > _order(self._position):
                # This skips the unreadable batch. Batches of others before this id are lost.
                self._position = self._said
            raise
        entries = answer[0][1] if answer and channel == self._channel else []
        if entries:
            self._position = entries[-1][0]
        return [Received(self._batch_of(fields), self._age_s(entry)) for entry, fields in entries]

    async def stored(self) -> Received | None:
        for _ in range(_READ_TABLE_TIMES):
            head = await self._piece(0)
            position = head[: _MOST_POSITION_BYTES + 1].partition(b"\n")[0]
            if not head:
                return None
            order = _order(position)
            value = await self._table_after(head)
            if (await self._piece(0, size=len(position) + 1)).rstrip(b"\n") == position:
                table = await self._opened_table(memoryview(value)[len(position) + 1 :])
                if table is None:
                    return None
                self._position = b"%d-%d" % order
                await self._recover()
                return Received(table, self._age_s(position))
        raise LinkError("the stored table was replaced each time it was read", reason="refused")

    async def _opened_table(self, table: memoryview) -> memoryview | None:
        """Return the table without its signature. None: the signature is wrong. A table has many megabytes,
        so a thread makes and checks signatures.
        """
        if self._seal is None:
            return table
        return await asyncio.to_thread(self._seal.opened, "table", table, channel=self._channel)

    async def _table_after(self, piece: bytes) -> bytearray:
        """Return the whole value, read in pieces: copying many megabytes in one step would hold the loop."""
        table = bytearray(piece)
        while len(piece) == MOST_PIECE_BYTES:
            if len(table) > MOST_TABLE_BYTES:
                raise LinkError(f"the stored table has more than {MOST_TABLE_BYTES} bytes", reason="refused")
            piece = await self._piece(len(table))
            table += piece
        return table

    async def _piece(self, start: int, *, size: int = MOST_PIECE_BYTES) -> bytes:
        end = start + size - 1
        return cast("bytes", await self._call(lambda client: client.getrange(self._table, start, end)))

    def position(self) -> bytes:
        return self._position

    async def store(self, table: bytes, *, since: bytes) -> None:
        if self._seal is not None:
            signature = await asyncio.to_thread(self._seal.sign, "table", table, channel=self._channel)
            table = signature + table
        data = since + b"\n" + table
        await self._call(lambda client: client.set(self._table, data, px=_KEEP_MS))
        await self._call(lambda client: client.pexpire(self._stream, _KEEP_MS))

    async def take_turn(self, *, period_s: float) -> bool:
        key = f"{self._channel}:turn:store"
        taken = await self._call(lambda client: client.set(key, b"1", nx=True, px=int(period_s * 1000)))
        return bool(taken)

    async def close(self) -> None:
        """End all connections. The next call connects again."""
        clients = [client for client in (self._client, *self._others) if client is not None]
        self._client, self._others = None, []
        await _end(*clients)

    # -- parts -----------------------------------------------------------------------------------------------

    @property
    def _stream(self) -> str:
        return f"{self._channel}:stream"

    @property
    def _table(self) -> str:
        return f"{self._channel}:table"

    def _batch_of(self, fields: dict[bytes, bytes]) -> bytes | memoryview:
        """Return the batch of a stream's entry. Empty, which is no batch: it was not signed."""
        batch = fields.get(_FIELD, b"")
        if self._seal is None:
            return batch
        return self._seal.opened("batch", batch, channel=self._channel) or b""

    def _age_s(self, entry: bytes) -> float:
        return max(0.0, (self._clock() * 1000 + self._ahead_ms - _order(entry)[0]) / 1000)

    async def _recover(self) -> None:
        """Read on from the newest id, if it is smaller than the last id that we read. Otherwise `read` would
        wait for entries that cannot come.
        """
        last = await self._last_id()
        if _order(last) < _order(self._position):
            self._position = last
        self._unsure = False

    async def _last_id(self) -> bytes:
        entries = await self._call(lambda client: client.xrevrange(self._stream, count=1))
        return cast("bytes", entries[0][0]) if entries else _START

    async def _call(self, command: Callable[[Any], Awaitable[_T]]) -> _T:
        client = self._client
        try:
            if client is None:
                client, self._others = self._connect(self._settings)
                self._client = client
            async with asyncio.timeout(_TIMEOUT_S):
                return await command(client)
        except (exceptions.RedisError, OSError, ValueError) as error:
            self._unsure = True
            if isinstance(error, _NOT_HERE) and client is self._client:
                await self.close()
            reason = next((reason for kinds, reason in _REASONS if isinstance(error, kinds)), "refused")
            raise LinkError(f"{error}{_hint(error)}" or "no answer in time", reason=reason) from error
        finally:
            if client is not None and client is not self._client:
                await _end(client)  # it may have connected once more after it was closed


async def _end(*clients: Any) -> None:
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


def _connect(settings: Redis) -> Clients:
    target = settings.target
    options: dict[str, Any] = {
        "socket_timeout": _TIMEOUT_S,
        "socket_connect_timeout": _TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "credential_provider": _credentials(settings.username, settings.password_file),
    }
    tls = _tls(settings)
    if target.kind == "single":
        host, port = target.hosts[0]
        return _bounded(aredis.Redis(host=host, port=port, db=target.database, **options, **tls)), []
    if target.kind == "cluster":
        nodes = [ClusterNode(host, port) for host, port in target.hosts]
        # One retry, because after a failover the first attempt only finds out where the slot is now.
        options["retry"] = Retry(NoBackoff(), 1)
        cluster = RedisCluster(startup_nodes=nodes, require_full_coverage=False, **options, **tls)
        cluster.connection_kwargs["parser_class"] = _BoundedParser
        return cluster, []
    sentinel = {
        **options,
        **tls,
        "credential_provider": _credentials(settings.sentinel_username, settings.sentinel_password_file),
    }
    master_of = Sentinel(target.hosts, sentinel_kwargs=sentinel, **options, **tls)  # type: ignore[no-untyped-call]  # redis-py
    return _bounded(master_of.master_for(target.master, db=target.database)), list(master_of.sentinels)


def _bounded(client: Any) -> Any:
    """Return the same client, with a bound on the size of replies."""
    client.connection_pool.connection_kwargs["parser_class"] = _BoundedParser
    return client


def _credentials(username: str, password_file: str) -> CredentialProvider | None:
    return _PasswordFile(username=username, password_file=password_file) if password_file else None


def _tls(settings: Redis) -> dict[str, Any]:
    if not settings.target.tls:
        return {}
    tls = settings.tls
    return {
        "ssl": True,
        "ssl_ca_certs": tls.ca_file or None,
        "ssl_certfile": tls.cert_file or None,
        "ssl_keyfile": tls.key_file or None,
        "ssl_check_hostname": tls.check_hostname,
    }


def _order(entry: bytes) -> tuple[int, int]:
    """Return a stream entry's id as numbers that can be compared. Raises LinkError for anything else."""
    milliseconds, _, number = entry.partition(b"-")
    number = number or b"0"
    if len(entry) <= _MOST_POSITION_BYTES and milliseconds.isdigit() and number.isdigit():
        order = int(milliseconds), int(number)
        if max(order) < 2**64:
            return order
    raise LinkError("Redis returned a position that is not the id of a stream's entry", reason="refused")
