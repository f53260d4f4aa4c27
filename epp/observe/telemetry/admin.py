"""Serves the admin address: metrics, health, decisions, state, and a page for a browser. Clients of the
gateway must never reach this address.

These pages only read; they change nothing. All answers are JSON, including errors, except the page and the
metrics. Connections are few and short, and no answer holds the event loop for long. A browser must use an
address or a name that the configuration knows. So no other web page can read these pages through the browser
(DNS rebinding). Started and stopped by `app`.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from importlib import resources
from typing import Final
from urllib.parse import quote

import msgspec
from aiohttp import web
from multidict import MultiMapping

from epp.base.types import Address
from epp.config.policy import Policy
from epp.observe.telemetry.board import Board
from epp.observe.telemetry.decisions import as_json, encode
from epp.observe.telemetry.metrics import Metrics
from epp.transport.accepting import Acceptor, listener_at

_SHOWN: Final = 50
_MAX_SHOWN: Final = 1000
_WINDOW_S: Final = 600
_MOST_WINDOW_S: Final = 900
_PORTION: Final = 20
"""Decisions that are encoded in one turn of the loop. Each lists every endpoint."""
_MAX_CONNECTIONS: Final = 64
_BACKLOG: Final = 100
_LIFETIME_S: Final = 10.0
_FILES: Final = {"index.html": "text/html", "live.css": "text/css", "live.js": "text/javascript"}
"""The live page, served as it is: the script fills it from `live`."""
_CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""Allows only what this address serves: no other host, no inline script, no styles except those of the file.
"""
_JSON: Final = "application/json"
_PageHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(kw_only=True, eq=False)
class AdminServer:
    """Serves on `address`. Port 0 takes a free port."""

    address: Address
    metrics: Metrics
    board: Board
    not_ready: Callable[[], str]
    """Says why the picker is not ready. Empty: it is."""
    recording: Callable[[int | None], tuple[bytes, int, int]]
    hosts: tuple[str, ...]
    policy: Callable[[], Policy]

    def __post_init__(self) -> None:
        folder = resources.files("epp.observe.telemetry") / "live"
        self._files = {name: (folder / name).read_bytes() for name in _FILES}
        application = web.Application(middlewares=[self._guarded])
        application.add_routes(
            [
                web.get("/", self._page),
                web.get("/live", self._live),
                *(web.get(f"/{name}", self._page) for name in self._files),
                web.get("/metrics", self._prometheus),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/decisions", self._recent),
                web.get("/decisions/{request_id:.+}", self._decision),
                web.get("/endpoints", self._endpoints),
                web.get("/explain", self._explained),
                web.get("/recording", self._recorded),
                web.get("/policy", self._policy_in_use),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        bound = BoundedConnections(self._protocol, limit=_MAX_CONNECTIONS, lifetime_s=_LIFETIME_S)
        self._acceptor = Acceptor(bound.welcome)

    async def start(self) -> Address:
        """Listen. Returns the address. OSError: the address cannot be used."""
        await self._runner.setup()
        listener = listener_at(self.address.host, self.address.port, backlog=_BACKLOG)
        self._acceptor.start(listener)
        host, port, *_ = listener.getsockname()
        return Address(host=host, port=port)

    async def stop(self) -> None:
        await self._acceptor.stop()
        await self._runner.cleanup()

    def _protocol(self) -> asyncio.Protocol:
        assert self._runner.server is not None, "set up at the start"
        return self._runner.server()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: _PageHandler) -> web.StreamResponse:
        """Refuse unknown hosts, show errors as JSON, and let no browser keep an answer or guess its type.
        Close each connection after its answer, since an idle connection would take a place.
        """
        try:
            if not _is_known(request.headers.get("Host", ""), names=self.hosts):
                raise web.HTTPMisdirectedRequest(
                    text="ask by an IP address, as localhost, or by a name in admin.hosts"
                )
            answer = await handler(request)
        except web.HTTPException as error:
            usual = not error.text or error.text.startswith(f"{error.status}:")
            answer = _json({"error": error.reason if usual else error.text}, status=error.status)
            if "Allow" in error.headers:
                answer.headers["Allow"] = error.headers["Allow"]
        answer.headers.update({"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"})
        answer.force_close()
        return answer

    async def _page(self, request: web.Request) -> web.Response:
        name = request.path.lstrip("/") or "index.html"
        headers = {"Content-Security-Policy": _CONTENT_SECURITY_POLICY, "Referrer-Policy": "no-referrer"}
        return web.Response(
            body=self._files[name], content_type=_FILES[name], charset="utf-8", headers=headers
        )

    async def _live(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self.board.packed(), content_type=_JSON, headers={"Content-Encoding": "gzip"}
        )

    async def _prometheus(self, _: web.Request) -> web.Response:
        pieces = []
        for piece in self.metrics.pieces():
            pieces.append(piece)
            await asyncio.sleep(0)
        return web.Response(
            body=b"".join(pieces), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def _healthz(self, _: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _readyz(self, _: web.Request) -> web.Response:
        reason = self.not_ready()
        if reason:
            return _json({"status": "not ready", "reason": reason}, status=503)
        return _json({"status": "ready"})

    async def _recent(self, request: web.Request) -> web.Response:
        limit = _whole(request.query, "limit", usual=_SHOWN, most=_MAX_SHOWN)
        records = self.board.decisions.last(limit, endpoint=request.query.get("endpoint", ""))
        shown = []
        for n, record in enumerate(records, 1):
            shown.append(encode(as_json(record)))
            if n % _PORTION == 0:
                await asyncio.sleep(0)
        body = b'{"decisions": [\n' + b",\n".join(shown) + b"]}\n"
        return web.Response(body=body, content_type=_JSON)

    async def _decision(self, request: web.Request) -> web.Response:
        request_id = request.match_info["request_id"]
        if "text/html" in request.headers.get("Accept", ""):  # a browser: the live page shows the decision
            place = f"{'../' * (1 + request_id.count('/'))}#{quote(request_id, safe='')}"
            return web.Response(status=302, headers={"Location": place})
        record = self.board.decisions.get(request_id)
        if record is None:
            kept = len(self.board.decisions)
            raise web.HTTPNotFound(text=f"no decision of that request id among the last {kept}")
        return _json(as_json(record))

    async def _endpoints(self, _: web.Request) -> web.Response:
        status = self.board.state()
        names = [each.name for each in fields(status) if each.name != "policy_info"]
        return _json({name: getattr(status, name) for name in names})

    async def _explained(self, request: web.Request) -> web.Response:
        window_s = _whole(request.query, "window", usual=_WINDOW_S, most=_MOST_WINDOW_S)
        return _json(self.board.explain(float(window_s)))

    async def _recorded(self, request: web.Request) -> web.Response:
        """Return the requests from a number on, for `epp record`."""
        since = _whole(request.query, "since", usual=1, most=10**9) if "since" in request.query else None
        lines, left_out, following = self.recording(since)
        headers = {"Left-Out": str(left_out), "Next": str(following)}
        return web.Response(body=lines, content_type="application/x-ndjson", headers=headers)

    async def _policy_in_use(self, _: web.Request) -> web.Response:
        return _json(msgspec.to_builtins(self.policy()))


def _is_known(host: str, *, names: tuple[str, ...]) -> bool:
    """Return whether a Host field names this address in a way that the configuration knows."""
    name = re.sub(r":[0-9]*$", "", host).strip("[]").lower().rstrip(".")
    if name in ("", "localhost", *names):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=encode(value), status=status, content_type=_JSON)


def _whole(query: MultiMapping[str], name: str, *, usual: int, most: int) -> int:
    text = query.get(name, str(usual))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise web.HTTPBadRequest(text=f"{name}: expected a whole number above 0")
    return min(int(text), most)


class BoundedConnections:
    """The connections of one address. A client that never finishes its request, or never reads the answer,
    would keep a file descriptor. So each connection ends after `lifetime_s`, and a new one ends the oldest if
    more than `limit` are open.
    """

    def __init__(self, accept: Callable[[], asyncio.Protocol], *, limit: int, lifetime_s: float) -> None:
        """accept: makes the protocol of one connection."""
        self._accept = accept
        self._limit = limit
        self._lifetime_s = lifetime_s
        self._open: dict[socket.socket, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}

    async def welcome(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(self._accept, sock)
        self._open[sock] = transport, loop.call_later(self._lifetime_s, transport.abort)
        for closed in [each for each in self._open if each.fileno() < 0]:
            self._end(closed)
        while len(self._open) > self._limit:
            self._end(next(iter(self._open)))

    def _end(self, sock: socket.socket) -> None:
        """End a connection without waiting until the other side has read everything."""
        transport, timer = self._open.pop(sock)
        timer.cancel()  # it would keep the answer in memory
        transport.abort()
