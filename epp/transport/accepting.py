"""Accepts the connections of a listening socket, loses none of them when it stops, and ends a connection
without losing its last bytes.

asyncio's own servers take a connection in one turn of the loop and give it to its protocol in a later turn. A
server that is closed in between leaves the connection open for ever, or logs an error. Our own HTTP/2, the
admin address and the hub of the workers use this module.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Final

_log = logging.getLogger(__name__)

_RETRY_S: Final = 0.1

Welcome = Callable[[socket.socket], Coroutine[Any, Any, None]]


def listener_at(host: str, port: int, *, backlog: int) -> socket.socket:
    """Return a socket that listens at an IP address. `::` takes IPv4 too. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=host == "::")


def address_of(name: object) -> str:
    """Return the address in the name of a socket, without the port. Empty: it is a unix socket."""
    return str(name[0]) if isinstance(name, tuple) else ""


def end_our_side(transport: asyncio.Transport) -> None:
    """End our side of a connection. Bytes that the peer has already sent are read and thrown away, because
    closing a socket that holds unread bytes loses our last ones.
    """
    if not transport.can_write_eof():
        transport.close()
        return
    try:
        transport.write_eof()
    except OSError:  # The peer is gone.
        transport.abort()
    else:
        transport.resume_reading()


class Acceptor:
    """Runs `welcome` for each connection, in a task of its own, until `stop`. `welcome` owns the connection
    from its first step. If `welcome` raises OSError, the connection is closed.
    """

    def __init__(
        self,
        welcome: Welcome,
        *,
        has_room: Callable[[int, str], bool] = lambda *_: True,
        most_arriving: int = 2**31,
        on_fault: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`has_room` gets the number of running tasks and the address of a newcomer, and says whether the
        newcomer may come. If `most_arriving` tasks run, the oldest is cancelled. `on_fault` is called with
        the reason if a connection is not accepted.
        """
        self._welcome = welcome
        self._has_room = has_room
        self._most_arriving = most_arriving
        self._fault = on_fault
        self._listener: socket.socket | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}

    @property
    def listening(self) -> bool:
        return self._listener is not None

    def start(self, listener: socket.socket) -> None:
        """Accept the connections of a listening socket, and own this socket."""
        listener.setblocking(False)
        self._listener = listener
        self._listen()

    async def stop(self) -> None:
        """Close the listening socket and cancel the tasks. A second call does nothing."""
        if self._listener is None:
            return
        listener, self._listener = self._listener, None
        asyncio.get_running_loop().remove_reader(listener)
        listener.close()
        await asyncio.sleep(0)  # A task that is cancelled before it begins does not close its socket.
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _listen(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection. Connections without room are refused at once, so that file descriptors
        remain for everything else.
        """
        loop = asyncio.get_running_loop()
        try:
            sock, name = listener.accept()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fault("accept_failed")
            _log.warning("a connection could not be accepted: %s", error.strerror)
            loop.remove_reader(listener)
            loop.call_later(_RETRY_S, self._listen)
            return
        if len(self._tasks) >= self._most_arriving:
            oldest = next(iter(self._tasks))
            del self._tasks[oldest]
            oldest.cancel()
        if not self._has_room(len(self._tasks), address_of(name)):
            self._fault("too_many_connections")
            sock.close()
            return
        sock.setblocking(False)
        task = loop.create_task(self._begin(sock), name="connection")
        self._tasks[task] = None
        task.add_done_callback(lambda task: self._tasks.pop(task, None))

    async def _begin(self, sock: socket.socket) -> None:
        try:
            await self._welcome(sock)
        except OSError as error:
            _log.debug("a connection failed at its beginning: %s", error)
            sock.close()
