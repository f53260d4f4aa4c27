"""The admin address's front page: endpoints and recent decisions as tables, for a browser.

One self-contained HTML document, made anew for each look; a few lines of script fetch it again every two seconds and
swap the tables, and without script it is simply a page. Everything shown passes through `html.escape`: names and
request ids come from outside. Called by `admin`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final
from urllib.parse import quote

from epp.decision import Decision
from epp.telemetry.decisions import Record, printable
from epp.telemetry.state import EndpointStatus, PickerStatus

_SCRIPT: Final = """
setInterval(async () => {
  if (document.hidden || getSelection().toString()) return;
  try {
    const text = await (await fetch(location.href)).text();
    const fresh = new DOMParser().parseFromString(text, "text/html").querySelector("main");
    document.querySelector("main").replaceWith(fresh);
    document.body.classList.remove("stale");
  } catch { document.body.classList.add("stale"); }
}, 2000);
"""
_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --bad: #c33; --good: #2a7; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5rem; }
body.stale main { opacity: .4; }
h1 { font-size: 1.25rem; margin: 0 0 .25rem; } h2 { font-size: 1rem; margin: 1.5rem 0 .4rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; background: var(--soft); } .n { text-align: right; font-variant-numeric: tabular-nums; }
td.wide { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
.bad { color: var(--bad); } .good { color: var(--good); } .scroll { overflow-x: auto; }
"""


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


CONTENT_SECURITY_POLICY: Final = (
    f"default-src 'none'; connect-src 'self'; script-src 'sha256-{_digest(_SCRIPT)}'; "
    f"style-src 'sha256-{_digest(_STYLE)}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Only this script and this style run, whatever else might get onto the page."""

_COLUMN_CLASSES: Final = {"#": ' class="n"', "~": ' class="wide"'}
_ENDPOINT_HEADS: Final = (
    *("endpoint", "address", "state", "#in flight", "#backlog tokens", "#running", "#waiting", "#KV cache"),
    *("#prefill tok/s", "#table entries", "#table full", "#evicted", "#scraped", "~adapters"),
)
_DECISION_HEADS: Final = (
    *("time (UTC)", "request", "kind", "model", "endpoint", "why", "#prompt tokens", "#matched", "#score"),
    *("outcome", "#status", "#first token"),
)


def render(status: PickerStatus, records: Sequence[Record], *, unix_now_s: float) -> str:
    """The whole document."""
    ready = sum(e.ready for e in status.endpoints)
    state = "draining" if status.draining else f"{ready} of {len(status.endpoints)} endpoints ready"
    in_flight = sum(e.in_flight for e in status.endpoints)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>prefix-gateway picker</title>'
        f"<style>{_STYLE}</style></head><body><main><h1>prefix-gateway picker</h1>"
        f"<p>policy <b>{_text(status.policy)}</b>, rule <b>{_text(status.rule)}</b> &middot; {state} &middot; "
        f"{in_flight:,} in flight &middot; {status.table_entries:,} table entries &middot; {_clock(unix_now_s)} UTC</p>"
        f"<h2>Endpoints</h2>{_table(_ENDPOINT_HEADS, _endpoint_rows(status.endpoints), 'No endpoints.')}"
        f"<h2>Last decisions</h2>{_table(_DECISION_HEADS, map(_record_cells, records), 'No requests yet.')}"
        '<p><a href="metrics">metrics</a> &middot; <a href="decisions">decisions</a> &middot; '
        '<a href="endpoints">endpoints</a> &middot; <a href="config">config</a> &middot; '
        '<a href="policy">policy</a></p>'
        f"</main><script>{_SCRIPT}</script></body></html>"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], nothing: str) -> str:
    """Heads that begin with # name columns of numbers, with ~ columns of wrapped text.

    Cells are HTML already. A row of one cell is a remark that takes the whole width.
    """
    classes = [_COLUMN_CLASSES.get(head[0], "") for head in heads]
    top = "".join(f"<th{c}>{escape(h.lstrip('#~'))}</th>" for c, h in zip(classes, heads, strict=True))
    body = "".join(
        f'<tr><td class="wide" colspan="{len(heads)}">{row[0]}</td></tr>'
        if len(row) == 1
        else "<tr>" + "".join(f"<td{c}>{cell}</td>" for c, cell in zip(classes, row, strict=True)) + "</tr>"
        for row in rows
    )
    body = body or f'<tr><td colspan="{len(heads)}">{escape(nothing)}</td></tr>'
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _endpoint_rows(endpoints: Iterable[EndpointStatus]) -> Iterator[Sequence[str]]:
    for e in endpoints:
        full = e.table_bytes / e.table_capacity_bytes if e.table_capacity_bytes else None
        yield (
            _text(e.name),
            _text(str(e.address)),
            '<span class="good">ready</span>' if e.ready else '<span class="bad">left out</span>',
            _count(e.in_flight),
            _count(e.backlog_tokens),
            _count(e.running),
            _count(e.waiting),
            _share(e.kv_usage),
            _count(e.prefill_tokens_per_s),
            _count(e.table_entries),
            _share(full),
            _count(e.table_evictions),
            "never" if e.scrape_age_s is None else f"{e.scrape_age_s:.1f} s ago",
            _text(", ".join(e.adapters)),
        )
        if e.left_out:
            yield (f'<span class="bad">{_text(e.name)} gets only trial requests: {_text(e.left_out)}</span>',)
        if e.scrape_error:
            yield (f'<span class="bad">scrape of {_text(e.name)}: {_text(e.scrape_error, 300)}</span>',)


def _record_cells(record: Record) -> Sequence[str]:
    link = f'<a href="decisions/{quote(printable(record.request_id), safe="")}">{_text(record.request_id, 40)}</a>'
    if not isinstance(record, Decision):
        outcome = f'<span class="bad">refused: {_text(record.reason)}</span>'
        return (_clock(record.at_unix_s), link, *("",) * 7, outcome, str(record.status), "")
    model = f"{record.model} ({record.adapter})" if record.adapter else record.model
    share = record.matched_tokens / record.prompt_tokens if record.prompt_tokens else 0.0
    return (
        _clock(record.at_unix_s),
        link,
        _text(record.kind),
        _text(model, 40),
        _text(record.chosen),
        _text(record.reason),
        _count(record.prompt_tokens),
        f"{record.matched_tokens:,} ({share:.0%})",
        f"{record.candidates[0].score_s * 1000:,.0f} ms" if record.candidates else "",
        _text(record.outcome) or "in flight",
        str(record.status or ""),
        "" if record.ttft_s is None else f"{record.ttft_s * 1000:,.0f} ms",
    )


def _text(text: str, at_most: int = 120) -> str:
    shown = printable(text)
    return escape(shown if len(shown) <= at_most else shown[: at_most - 1] + "…")


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _clock(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%H:%M:%S")
