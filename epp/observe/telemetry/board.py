"""Makes the data of the live page, as JSON, at most every few seconds for any number of browsers.

The JSON has columns instead of objects, since there may be a thousand endpoints, and a short history of each
endpoint for its spark line. Several pickers can share one page: the picker that is asked adds the answers of
its siblings. Everything is bounded: rows by the fleet, decisions by number, siblings by number, size, time,
and by how long their part takes to read. `admin` asks for the data, and `app` keeps `run` running.
"""

from __future__ import annotations

import asyncio
import gzip
import secrets
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypedDict

import aiohttp
import msgspec

from epp.base.types import Address
from epp.observe.telemetry.decisions import DecisionRing, Record, printable
from epp.observe.telemetry.picker_state import EndpointStatus, PickerStatus, StatusSource
from epp.picker.decision import Decision
from epp.request import bounded_json

_SAMPLE_S: Final = 10.0
_SAMPLES: Final = 30
_SMALL_FLEET: Final = 100
_FRESH_S: Final = 2.0
_FRESH_LARGE_S: Final = 10.0
"""Seconds between two versions of the JSON for many endpoints, since reading all of them costs CPU."""
_SHOWN_DECISIONS: Final = 40
_MOST_TENANTS: Final = 10
_NAME_CHARS: Final = 80
_WINDOW_S: Final = 300.0
_PEER_WITHIN_S: Final = 1.0
_MOST_PEERS: Final = 64
_PEER_BYTES: Final = 2**18
_PEERS_BYTES: Final = 4 * 2**20
"""Bound of the parts of all other pickers together."""
_PEER_UNITS: Final = 8_000
"""Bound of the strings, lists, objects and commas in another picker's part."""
_ENCODER: Final = msgspec.json.Encoder()

_Counters = tuple[float, float, float, float]
"""The backlog in seconds, and the tokens that were looked up, found and predicted so far."""

COLUMNS: Final = (
    *("name", "state", "why", "load", "waiting", "backlog_s", "kv", "mirror", "predicted", "actual", "spark"),
)


class Board:
    """`explain`, `prefixes`, `dry_run`: other parts of the page. `siblings`: `host:port` of other pickers'
    admin pages.
    """

    def __init__(
        self,
        *,
        state: StatusSource,
        decisions: DecisionRing,
        explain: Callable[[float], dict[str, Any]],
        prefixes: Callable[[], list[dict[str, Any]]],
        dry_run: Callable[[], dict[str, Any] | None],
        siblings: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._decisions = decisions
        self._explain = explain
        self._prefixes = prefixes
        self._dry_run = dry_run
        self._siblings = siblings
        self._clock = clock
        self._id = secrets.token_hex(8)
        self._history: deque[dict[str, _Counters]] = deque(maxlen=_SAMPLES)
        self._own: tuple[float, dict[str, Any]] | None = None
        self._packed: tuple[float, bytes] | None = None
        self._packing: asyncio.Lock | None = None

    async def run(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(_SAMPLE_S)

    def sample(self) -> None:
        self._history.append({e.name: _counters(e) for e in self._state().endpoints})

    def own(self) -> dict[str, Any]:
        """Return the part of the page that this picker makes alone."""
        now = self._clock()
        if self._own is None or now - self._own[0] >= self._own[1]["refresh_s"]:
            self._own = (now, self._made())
        return self._own[1]

    def part(self) -> dict[str, Any]:
        """Return the part for another picker's page: everything but the servers, which that picker sees
        itself.
        """
        return self.own() | {"endpoints": [], "prefixes": []}

    async def packed(self) -> bytes:
        """Return all pickers' parts, gzipped. Made once for all browsers that ask at about the same time."""
        self._packing = self._packing or asyncio.Lock()
        async with self._packing:
            own = self.own()
            if self._packed is None or self._clock() - self._packed[0] >= own["refresh_s"] * 0.9:
                others = await _answers_of(self._siblings, but=self._id)
                whole = merged(own, others) if others else own
                packed = await asyncio.to_thread(gzip.compress, _ENCODER.encode(whole), 1, mtime=0)
                self._packed = (self._clock(), packed)
        return self._packed[1]

    def _made(self) -> dict[str, Any]:
        status = self._state()
        oldest = self._history[0] if self._history else {}
        return {
            "picker": self._id,
            "pickers": 1,
            "policy": status.policy,
            "rule": status.rule,
            "draining": status.draining,
            "overload": status.overload_ratio,
            "table_entries": status.table_entries,
            "refresh_s": _FRESH_S if len(status.endpoints) <= _SMALL_FLEET else _FRESH_LARGE_S,
            "columns": COLUMNS,
            "endpoints": [self._row(e, oldest.get(e.name)) for e in status.endpoints],
            "prefixes": self._prefixes(),
            "queue": _queue(status),
            "requests": [_shown(record) for record in self._decisions.last(_SHOWN_DECISIONS)],
            "dry_run": self._dry_run(),
            "explain": self._explain(_WINDOW_S),
        }

    def _row(self, e: EndpointStatus, before: _Counters | None) -> tuple[Any, ...]:
        backlog_s, queries, hits, predicted = _counters(e)
        _, queries_0, hits_0, predicted_0 = before or (0.0, queries, hits, predicted)
        asked = queries - queries_0
        return (
            e.name,
            "ready" if e.ready else "out",
            printable(e.left_out or e.scrape_error)[:_NAME_CHARS],
            max(e.in_flight + e.peers_in_flight, (e.running or 0) + (e.waiting or 0)),
            e.waiting,
            round(backlog_s, 2),
            _rounded(e.kv_usage),
            _rounded(e.table_bytes / e.table_capacity_bytes if e.table_capacity_bytes else None),
            _rounded(min(1.0, max(0.0, (predicted - predicted_0) / asked)) if asked > 0 else None),
            _rounded(min(1.0, max(0.0, (hits - hits_0) / asked)) if asked > 0 else None),
            [round(sample[e.name][0], 1) for sample in self._history if e.name in sample],
        )


def _counters(e: EndpointStatus) -> _Counters:
    rate = e.prefill_tokens_per_s or 0.0
    backlog_s = e.backlog_tokens / rate if rate else 0.0
    return backlog_s, e.prefix_queries_tokens or 0.0, e.prefix_hits_tokens or 0.0, float(e.predicted_tokens)


def _queue(status: PickerStatus) -> list[dict[str, Any]]:
    return [
        {
            "model": flow.model,
            "saturation": round(flow.saturation, 3),
            "oldest_s": round(flow.oldest_s, 2),
            "priorities": {str(priority): count for priority, count in flow.requests.items()},
            "tenants": [
                {
                    "tenant": printable(waiting.tenant)[:_NAME_CHARS],
                    "priority": waiting.priority,
                    "requests": waiting.requests,
                    "tokens": waiting.tokens,
                }
                for waiting in flow.tenants[:_MOST_TENANTS]
            ],
        }
        for flow in status.flow
    ]


def _shown(record: Record) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": printable(record.request_id),
        "at": round(record.at_unix_s, 3),
        "reason": record.reason,
        "outcome": record.outcome,
        "status": record.status,
    }
    if isinstance(record, Decision):
        tried = record.dry_run
        shown |= {
            "kind": record.kind,
            "model": printable(record.model)[:_NAME_CHARS],
            "chosen": record.served_by or record.chosen,
            "prompt": record.prompt_tokens,
            "matched": record.matched_tokens,
            "ttft_s": record.ttft_s,
            "would": None if tried is None or tried.agrees else tried.chosen or "(refuse)",
            "would_cached": 0 if tried is None else tried.more_cached_tokens,
            "would_s": 0.0 if tried is None else tried.more_s,
        }
    return shown


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


# -- several pickers -----------------------------------------------------------------------------------------


async def _answers_of(names: Sequence[str], *, but: str) -> list[dict[str, Any]]:
    """Return the parts of the other pickers, each once. Pickers that do not answer in time are left out,
    and so is this picker.
    """
    if not names:
        return []
    addresses = await _addresses_of(names)
    timeout = aiohttp.ClientTimeout(total=_PEER_WITHIN_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        found = await asyncio.gather(*(_answer_of(session, address) for address in addresses))
    by_id: dict[str, dict[str, Any]] = {}
    room = _PEERS_BYTES
    for size, part in found:
        room -= size
        if part is not None and room >= 0 and part["picker"] != but:
            by_id[part["picker"]] = part
    return list(by_id.values())


async def _addresses_of(names: Sequence[str]) -> list[str]:
    """Return every address of these names. A headless Service has an address for each pod."""
    loop = asyncio.get_running_loop()
    found: dict[str, None] = {}
    for name in names:
        host, _, port = name.rpartition(":")
        try:
            async with asyncio.timeout(_PEER_WITHIN_S):
                entries = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except (OSError, OverflowError, TimeoutError):
            continue
        found |= {str(Address(host=str(entry[4][0]), port=int(port))): None for entry in entries}
    return list(found)[:_MOST_PEERS]


async def _answer_of(session: aiohttp.ClientSession, address: str) -> tuple[int, dict[str, Any] | None]:
    body = bytearray()
    try:
        async with session.get(f"http://{address}/live?own=1", allow_redirects=False) as answer:
            if answer.status != 200:
                return 0, None
            async for piece in answer.content.iter_any():
                body += piece
                if len(body) > _PEER_BYTES:
                    return 0, None
    except (aiohttp.ClientError, TimeoutError, OSError):
        return 0, None
    return len(body), part_of(bytes(body))


class _Asked(TypedDict):
    at: float


class _Cause(TypedDict):
    cause: str
    tokens: float
    servers: list[Any]


class _Explained(TypedDict, total=False):
    requests: float
    prompt_tokens: float
    matched_tokens: float
    causes: list[_Cause]


class _Tried(TypedDict):
    policy: str


class _Part(TypedDict):
    """The fields that another picker's part must have."""

    picker: str
    columns: tuple[str, ...]
    overload: float
    requests: list[_Asked]
    queue: list[Any]
    explain: _Explained
    dry_run: _Tried | None


def part_of(page: bytes) -> dict[str, Any] | None:
    """Return another picker's part. None: the part cannot be used, for example because that picker has
    another version, or because the answer is not from a picker.
    """
    try:
        found: dict[str, Any] = bounded_json.decode(page, most_units=_PEER_UNITS)
        known = msgspec.convert(found, _Part)["columns"] == COLUMNS
    except ValueError:
        return None
    return found if known else None


def merged(own: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one page of several pickers: the servers as this picker sees them, all pickers' requests by
    time, and the sums of their accounts.
    """
    every = [own, *others]
    requests = sorted((r for part in every for r in part["requests"]), key=lambda r: -r["at"])
    return own | {
        "pickers": len(every),
        "overload": max(part["overload"] for part in every),
        "requests": requests[:_SHOWN_DECISIONS],
        "queue": [queue for part in every for queue in part["queue"]],
        "explain": _added([part["explain"] for part in every]),
        "dry_run": _tried([part["dry_run"] for part in every]),
    }


def _tried(found: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the sums over all pickers that have the same policy in dry run as the first of them."""
    every = [tried for tried in found if tried]
    if not every:
        return None
    added: defaultdict[str, float] = defaultdict(float)
    for tried in every:
        if tried["policy"] != every[0]["policy"]:
            continue
        for name, value in tried.items():
            if isinstance(value, int | float):
                added[name] += value
    return {**every[0], **added}


def _added(accounts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the causes of all pickers together, by size."""
    first = accounts[0]
    prompt = sum(a.get("prompt_tokens", 0) for a in accounts)
    matched = sum(a.get("matched_tokens", 0) for a in accounts)
    by_cause: dict[str, dict[str, Any]] = {}
    for account in accounts:
        for cause in account.get("causes", ()):
            known = by_cause.setdefault(cause["cause"], {**cause, "tokens": 0, "servers": []})
            known["tokens"] += cause["tokens"]
            known["servers"] = [*known["servers"], *cause["servers"]][:10]
    missed = sum(cause["tokens"] for cause in by_cause.values())
    for cause in by_cause.values():
        cause["share_of_missed"] = round(cause["tokens"] / missed, 4) if missed else 0.0
        cause["share_of_prompt"] = round(cause["tokens"] / prompt, 4) if prompt else 0.0
    return first | {
        "requests": sum(a.get("requests", 0) for a in accounts),
        "prompt_tokens": prompt,
        "matched_tokens": matched,
        "hit_ratio": round(matched / prompt, 4) if prompt else 0.0,
        "causes": sorted(by_cause.values(), key=lambda cause: -cause["tokens"]),
    }
