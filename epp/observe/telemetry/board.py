"""Makes the data of the live page, as JSON, at most every few seconds for any number of browsers.

The JSON has columns instead of objects, since there may be a thousand endpoints, and a short history of each
endpoint for its spark line. Everything is bounded: rows by the fleet, decisions by number. `admin` asks for
the data, and `app` keeps `run` running.
"""

from __future__ import annotations

import asyncio
import gzip
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any, Final

import msgspec

from epp.observe.telemetry.decisions import DecisionRing, Record, printable
from epp.observe.telemetry.picker_state import EndpointStatus, PickerStatus, StatusSource
from epp.picker.decision import Decision

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
_RECENT_S: Final = 60.0
_ERROR_STATUS: Final = 400
_ENCODER: Final = msgspec.json.Encoder()

_Counters = tuple[float, float, float, float]
"""The backlog in seconds, and the tokens that were looked up, found and predicted so far."""

COLUMNS: Final = (
    *("name", "state", "why", "load", "waiting", "backlog_s", "kv", "mirror", "predicted", "actual", "spark"),
)


class Board:
    """`explain`, `dry_run`: other parts of the page."""

    def __init__(
        self,
        *,
        state: StatusSource,
        decisions: DecisionRing,
        explain: Callable[[float], dict[str, Any]],
        dry_run: Callable[[], dict[str, Any] | None],
        problems: Callable[[], list[str]] = list,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._decisions = decisions
        self._explain = explain
        self._dry_run = dry_run
        self._problems = problems
        self._clock = clock
        self._history: deque[dict[str, _Counters]] = deque(maxlen=_SAMPLES)
        self._packed: tuple[float, bytes] | None = None
        """The page, and until when it is fresh."""

    async def run(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(_SAMPLE_S)

    def sample(self) -> None:
        self._history.append({e.name: _counters(e) for e in self._state().endpoints})

    def packed(self) -> bytes:
        """Return the content of the page, gzipped. Made once for all browsers within some seconds."""
        now = self._clock()
        if self._packed is None or now >= self._packed[0]:
            own = self.own()
            self._packed = now + own["refresh_s"], gzip.compress(_ENCODER.encode(own), 1, mtime=0)
        return self._packed[1]

    def own(self) -> dict[str, Any]:
        status = self._state()
        oldest = self._history[0] if self._history else {}
        return {
            "policy": status.policy,
            "rule": status.rule,
            "problems": [printable(each) for each in (*_problems(status), *self._problems())],
            "recent": _recent(self._decisions),
            "table_entries": status.table_entries,
            "refresh_s": _FRESH_S if len(status.endpoints) <= _SMALL_FLEET else _FRESH_LARGE_S,
            "columns": COLUMNS,
            "endpoints": [self._row(e, oldest.get(e.name)) for e in status.endpoints],
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
            _rounded(min(1.0, e.table_bytes / e.table_capacity_bytes) if e.table_capacity_bytes else None),
            _rounded(min(1.0, max(0.0, (predicted - predicted_0) / asked)) if asked > 0 else None),
            _rounded(min(1.0, max(0.0, (hits - hits_0) / asked)) if asked > 0 else None),
            [round(sample[e.name][0], 1) for sample in self._history if e.name in sample],
        )


def _problems(status: PickerStatus) -> Iterator[str]:
    """Yield what is wrong with the picker and its servers now."""
    if not status.endpoints:
        yield "There are no endpoints: every request gets 503. Name some in the endpoints file or the pool."
    elif not any(e.ready for e in status.endpoints):
        yield "No endpoint is ready. The reason stands in its row."
    if status.overload_ratio > 0:
        yield f"The picker is overloaded: it passes {status.overload_ratio:.0%} of the requests unread. Give it more CPU."
    if status.draining:
        yield "The picker is ending: it takes no new data planes."


def _recent(records: DecisionRing) -> dict[str, Any]:
    """Return the figures of the requests of the last minute that are still kept."""
    newest = records[-1].at_unix_s if records else 0.0
    found = list(takewhile(lambda record: record.at_unix_s > newest - _RECENT_S, reversed(records)))
    span_s = _RECENT_S if len(found) < len(records) or len(found) < 2 else newest - found[-1].at_unix_s
    ttfts = sorted(r.ttft_s for r in found if isinstance(r, Decision) and r.ttft_s is not None)
    failed = sum((r.status or 0) >= _ERROR_STATUS or r.outcome in ("failed", "refused") for r in found)
    return {
        "newest": newest,
        "per_s": len(found) / max(1.0, span_s),
        "ttft_p50_s": ttfts[len(ttfts) // 2] if ttfts else None,
        "ttft_p90_s": ttfts[9 * len(ttfts) // 10] if ttfts else None,
        "errors": failed,
    }


def _counters(e: EndpointStatus) -> _Counters:
    rate = e.prefill_tokens_per_s or 0.0
    backlog_s = e.backlog_tokens / rate if rate else 0.0
    return backlog_s, e.prefix_queries_tokens or 0.0, e.prefix_hits_tokens or 0.0, float(e.predicted_tokens)


def _queue(status: PickerStatus) -> list[dict[str, Any]]:
    return [
        {
            "model": flow.model,
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
