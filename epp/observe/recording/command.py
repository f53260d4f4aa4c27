"""`epp record`: asks a running picker for the requests that it routes, and writes them to a file until it is
stopped.

The picker needs no restart and no disk. The lines come over its admin address, so the command may run on
another machine.
"""

from __future__ import annotations

import contextlib
import http.client
import secrets
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from epp.base.errors import ConfigError
from epp.observe.recording.file import RecordingFile
from epp.observe.recording.lines import Opening, RecordedRequest, Servers, decode

_EVERY_S: Final = 1.0
_WITHIN_S: Final = 8.0
_TRY_AGAIN_FOR_S: Final = 30.0
_MOST_BYTES: Final = 64 * 2**20
"""Largest size of one answer. The picker keeps 8 MiB of lines at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """The command line, as given."""

    admin: str
    file: Path
    max_bytes: int
    seconds: float | None
    """None: record until interrupted."""


@dataclass(slots=True)
class Counts:
    requests: int = 0
    size_bytes: int = 0
    left_out: int = 0
    """Requests that are missing because the picker had no room for them. It was not asked often enough."""


def record(options: RecordOptions) -> Counts:
    """Record until the end of the time, or until interrupted. ConfigError: the picker cannot be reached, or
    the file cannot be written.
    """
    url = f"{options.admin.rstrip('/')}/recording?reader={secrets.token_hex(8)}"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--admin {options.admin}: must be an address such as http://127.0.0.1:9090")
    file, counts = RecordingFile(options.file, max_bytes=options.max_bytes), Counts()
    until_s = None if options.seconds is None else time.monotonic() + options.seconds

    def keep(text: bytes, left_out: int) -> None:
        opening, servers, asked = _parsed(text, options.admin)
        try:
            file.write(asked, opening=opening, servers=servers)
        except OSError as error:
            raise ConfigError(f"{options.file}: {error.strerror}") from error
        if asked:
            counts.requests += len(asked)
            counts.size_bytes += len(text)
        counts.left_out = left_out
        _show(counts)

    try:
        for text, left_out in _answers(url, options.admin, until_s=until_s):
            keep(text, left_out)
    except KeyboardInterrupt:
        with contextlib.suppress(OSError, http.client.HTTPException):
            keep(*_ask(f"{url}&last"))
    finally:
        file.close()
        _show(None)
    return counts


def _parsed(text: bytes, admin: str) -> tuple[Opening, Servers, Sequence[RecordedRequest]]:
    """Return the lines of one answer of the picker."""
    stranger = f"--admin {admin}: the program that answers there is not a picker of this version"
    try:
        lines = [decode(row) for row in text.splitlines()]
    except ValueError as error:
        raise ConfigError(f"{stranger}: {error}") from error
    match lines:
        case [Opening() as opening, Servers() as servers, *rest]:
            return opening, servers, [line for line in rest if isinstance(line, RecordedRequest)]
    raise ConfigError(stranger)


def _answers(url: str, admin: str, *, until_s: float | None) -> Iterator[tuple[bytes, int]]:
    """Yield one answer each second, and one at the end. A silent picker is asked again for a while."""
    heard_s = float("-inf")
    while True:
        last = until_s is not None and time.monotonic() >= until_s
        try:
            answer = _ask(f"{url}&last" if last else url)
        except urllib.error.HTTPError as error:
            raise ConfigError(_refusal(admin, error.code)) from error
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() - heard_s > _TRY_AGAIN_FOR_S:
                why = getattr(error, "reason", error)
                raise ConfigError(
                    f"--admin {admin}: {why}; name the admin.address of a running picker"
                ) from error
        else:
            heard_s = time.monotonic()
            yield answer
        if last:
            return
        left_s = _EVERY_S if until_s is None else min(_EVERY_S, until_s - time.monotonic())
        time.sleep(max(0.0, left_s))


def _ask(url: str) -> tuple[bytes, int]:
    with urllib.request.urlopen(url, timeout=_WITHIN_S) as answer:  # noqa: S310 - http, checked by the caller
        left_out = answer.headers.get("Left-Out", "0")
        return answer.read(_MOST_BYTES), int(left_out) if left_out.isdecimal() and len(left_out) < 20 else 0


def _refusal(admin: str, status: int) -> str:
    reasons = {
        409: "another `epp record` is reading this picker; only one at a time can",
        404: "this picker has an older version, which `epp record` cannot read",
    }
    return f"--admin {admin}: {reasons.get(status, f'status {status}')}"


def _show(counts: Counts | None) -> None:
    """Show the counts on one line of a terminal, written over each time. None: remove the line."""
    if sys.stderr.isatty():
        text = "\r\033[K" if counts is None else f"\r{counts_text(counts)}; Ctrl-C ends it"
        print(text, end="", file=sys.stderr, flush=True)


def counts_text(counts: Counts) -> str:
    """Return the counts as text."""
    left_out = f", {counts.left_out:,} left out" if counts.left_out else ""
    return f"{counts.requests:,} requests, {counts.size_bytes / 2**20:.1f} MiB{left_out}"
