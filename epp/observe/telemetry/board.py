"""Makes the data of the live page, as JSON, at most every few seconds for any number of browsers.

The JSON has a row for each endpoint, with a short history for its spark line. Everything is bounded: rows by
the fleet, decisions by number. `admin` asks for the data, and `app` keeps `run` running.
"""

import asyncio
import gzip
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Final

import msgspec

from epp.observe.telemetry.decisions import DecisionRing, facts, printable
from epp.observe.telemetry.picker_state import EndpointStatus, PickerStatus, StatusSource
from epp.picker.decision import Decision
from epp.picker.flow.accounts import FlowStatus

_SAMPLE_S: Final = 10.0
_SAMPLES: Final = 30
_SMALL_FLEET: Final = 100
_SILENT_S: Final = 5.0
"""A server whose metrics page has failed for so long does not answer."""
_FRESH_S: Final = 2.0
_FRESH_LARGE_S: Final = 10.0
"""Seconds between two versions of the JSON for many endpoints, since reading all of them costs CPU."""
_SHOWN_DECISIONS: Final = 40
_MOST_TENANTS: Final = 10
_NAME_CHARS: Final = 80
_WINDOW_S: Final = 300.0
_RECENT_S: Final = 60.0
_ERROR_STATUS: Final = 400

_Counters = tuple[float, float, float, float]
"""The backlog in seconds, and the tokens that were looked up, found and predicted so far."""


@dataclass(kw_only=True, eq=False)
class Board:
    """`state`, `decisions` and `explain` are for the other pages too."""

    state: StatusSource
    decisions: DecisionRing
    explain: Callable[[float], dict[str, Any]]
    dry_run: Callable[[], dict[str, Any] | None]
    problems: Callable[[], list[str]] = list
    clock: Callable[[], float] = time.monotonic
    unix_clock: Callable[[], float] = time.time
    """The time of the decisions, which does not follow when the machine's clock is set."""
    _history: deque[dict[str, _Counters]] = field(init=False, default_factory=lambda: deque(maxlen=_SAMPLES))
    _packed: tuple[float, bytes] | None = field(init=False, default=None)
    """The page, and until when it is fresh."""

    async def run(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(_SAMPLE_S)

    def sample(self) -> None:
        self._history.append({e.name: _counters(e) for e in self.state().endpoints})

    def packed(self) -> bytes:
        """Return the content of the page, gzipped. Made once for all browsers within some seconds."""
        now = self.clock()
        if self._packed is None or now >= self._packed[0]:
            own = self.own()
            self._packed = now + own["refresh_s"], gzip.compress(msgspec.json.encode(own), 1, mtime=0)
        return self._packed[1]

    def own(self) -> dict[str, Any]:
        status = self.state()
        oldest = self._history[0] if self._history else {}
        return {
            "policy": status.policy,
            "rule": status.rule,
            "problems": [printable(each) for each in (*_problems(status), *self.problems())],
            "recent": _recent(self.decisions, now_unix_s=self.unix_clock()),
            "table_entries": status.table_entries,
            "refresh_s": _FRESH_S if len(status.endpoints) <= _SMALL_FLEET else _FRESH_LARGE_S,
            "endpoints": [self._row(e, oldest.get(e.name)) for e in status.endpoints],
            "queue": [_queue(flow) for flow in status.flow],
            "requests": [facts(record) for record in self.decisions.last(_SHOWN_DECISIONS)],
            "dry_run": self.dry_run(),
            "explain": self.explain(_WINDOW_S),
        }

    def _row(self, e: EndpointStatus, before: _Counters | None) -> dict[str, Any]:
        backlog_s, queries, hits, predicted = _counters(e)
        _, queries_0, hits_0, predicted_0 = before or (0.0, queries, hits, predicted)
        asked = queries - queries_0
        return {
            "name": e.name,
            "state": "ready" if e.ready else "out",
            "why": printable(e.ejected or e.scrape_error)[:_NAME_CHARS],
            "load": max(e.in_flight + e.peers_in_flight, (e.running or 0) + (e.waiting or 0)),
            "waiting": e.waiting,
            "backlog_s": round(backlog_s, 2),
            "kv": _share(e.kv_usage, 1.0),
            "mirror": _share(e.table_bytes, e.table_capacity_bytes),
            "predicted": _share(predicted - predicted_0, asked),
            "actual": _share(hits - hits_0, asked),
            "spark": [round(sample[e.name][0], 1) for sample in self._history if e.name in sample],
        }


def _problems(status: PickerStatus) -> Iterator[str]:
    """Yield what is wrong with the picker and its servers now."""
    if not status.endpoints:
        yield "There are no endpoints: every request gets 503. Name some in the endpoints file or the pool."
    elif not any(e.ready for e in status.endpoints):
        yield "No endpoint is ready. The reason stands in its row."
    elif all(e.scrape_error and (e.scrape_age_s or _SILENT_S) >= _SILENT_S for e in status.endpoints):
        yield f"No model server answers ({status.endpoints[0].scrape_error}). Requests are sent there all the same."
    if status.sharing is not None and not status.sharing.connected:
        yield "Other pickers cannot be reached: this one routes by its own requests. The log says why."
    if status.overload_ratio > 0:
        yield f"The picker is overloaded: it passes {100 * status.overload_ratio:.0f} % of the requests unread. Give it more CPU."
    if status.draining:
        yield "The picker is ending, after its requests in flight."


def _recent(records: DecisionRing, *, now_unix_s: float) -> dict[str, Any]:
    """Return the figures of the requests of the last minute that are still kept."""
    found = list(takewhile(lambda record: record.at_unix_s > now_unix_s - _RECENT_S, reversed(records)))
    span_s = _RECENT_S if len(found) < len(records) or len(found) < 2 else now_unix_s - found[-1].at_unix_s
    ttfts = sorted(r.ttft_s for r in found if isinstance(r, Decision) and r.ttft_s is not None)
    failed = sum((r.status or 0) >= _ERROR_STATUS or r.outcome in ("failed", "refused") for r in found)
    return {
        "per_s": len(found) / max(1.0, span_s),
        "ttft_p50_s": ttfts[len(ttfts) // 2] if ttfts else None,
        "ttft_p90_s": ttfts[9 * len(ttfts) // 10] if ttfts else None,
        "errors": failed,
    }


def _counters(e: EndpointStatus) -> _Counters:
    rate = e.prefill_tokens_per_s or 0.0
    backlog_s = e.backlog_tokens / rate if rate else 0.0
    return backlog_s, e.prefix_queries_tokens or 0.0, e.prefix_hits_tokens or 0.0, float(e.predicted_tokens)


def _queue(flow: FlowStatus) -> dict[str, Any]:
    most = flow.tenants[:_MOST_TENANTS]
    return {
        "model": flow.model,
        "oldest_s": round(flow.oldest_s, 2),
        "priorities": {str(priority): count for priority, count in flow.requests.items()},
        "tenants": [replace(each, tenant=printable(each.tenant)[:_NAME_CHARS]) for each in most],
    }


def _share(part: float | None, whole: float) -> float | None:
    """Return a number from 0 to 1. None: it is not known."""
    return round(min(1.0, max(0.0, part / whole)), 3) if part is not None and whole > 0 else None
