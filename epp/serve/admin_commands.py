"""The commands that ask a running picker over its admin address, perhaps from another machine.

`epp record` writes the requests that the picker routes to a new file, until it is stopped or the file is
full. The picker needs no restart and no disk. `epp explain` prints why prompt tokens were not cached.
"""

import contextlib
import http.client
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final

from epp.base.errors import ConfigError, usable
from epp.observe.recording import Opening, Servers
from epp.observe.recording import decode as decode_line
from epp.request.jsontext import decode

_EVERY_S: Final = 1.0
_WITHIN_S: Final = 8.0
_TRY_AGAIN_FOR_S: Final = 30.0
_MOST_BYTES: Final = 64 * 2**20
"""Largest size of one answer. The picker keeps 8 MiB of lines at most."""
_SHOWN_SERVERS: Final = 4


def _url(admin: str, page: str) -> str:
    if not admin.startswith(("http://", "https://")):
        raise ConfigError(f"--admin {admin}: must be an address such as http://127.0.0.1:9090")
    return f"{admin.rstrip('/')}/{page}"


def _no_picker(admin: str, error: Exception | str) -> ConfigError:
    reason = getattr(error, "reason", error)
    reason = getattr(reason, "strerror", None) or reason
    return ConfigError(f"--admin {admin}: {reason}; name the admin.address of a running picker")


@dataclass(slots=True)
class Counts:
    requests: int = 0
    size_bytes: int = 0
    left_out: int = 0
    """Requests that are missing because the picker was not asked often enough."""

    def __str__(self) -> str:
        left_out = f", {self.left_out:,} left out" if self.left_out else ""
        return f"{self.requests:,} requests, {self.size_bytes / 2**20:.1f} MiB{left_out}"


def record(path: Path, *, admin: str, max_bytes: int, seconds: float | None) -> Counts:
    """Record for this time, or until interrupted. ConfigError: the picker cannot be reached, or the file
    cannot be written.
    """
    url = _url(admin, "recording")
    counts, head = Counts(), [b"", b""]
    until_s = None if seconds is None else time.monotonic() + seconds
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        file: FileIO | None = None
        for text, left_out in _answers(url, admin, until_s=until_s):
            *new, requests = _parted(text, admin)
            counts.left_out += left_out
            lines = b"".join(line for line, old in zip(new, head, strict=True) if line != old) + requests
            if counts.size_bytes + len(lines) > max_bytes:
                break
            if requests:
                with usable(str(path), advice="name a new file where there is room"):
                    file = file or stack.enter_context(_new_file(path))
                    _write_all(file, lines)
                head = new
                counts.requests += requests.count(b"\n")
                counts.size_bytes += len(lines)
            _show(counts)
    _show(None)
    return counts


def _new_file(path: Path) -> FileIO:
    """Open a file that only its owner may read. FileExistsError: there is one of this name."""
    return FileIO(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600))


def _write_all(file: FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def _parted(text: bytes, admin: str) -> list[bytes]:
    """Return the line that opens a recording, the line of the servers, and the lines of the requests."""
    stranger = f"--admin {admin}: the program that answers there is not a picker of this version"
    parts = text.split(b"\n", 2)
    try:
        found = [decode_line(part) for part in parts[:2]]
    except ValueError as error:
        raise ConfigError(f"{stranger}: {error}") from error
    match found:
        case [Opening(), Servers()] if len(parts) == 3:
            return [parts[0] + b"\n", parts[1] + b"\n", parts[2]]
    raise ConfigError(stranger)


def _answers(url: str, admin: str, *, until_s: float | None) -> Iterator[tuple[bytes, int]]:
    """Yield one answer each second, and one at the end, each with the number of requests that are missing
    before it. A silent picker is asked again for a while.
    """
    heard_s, interrupted, following = float("-inf"), False, ""
    while True:
        last = interrupted or (until_s is not None and time.monotonic() >= until_s)
        try:
            with urllib.request.urlopen(f"{url}{following}", timeout=_WITHIN_S) as answer:  # noqa: S310 - http, checked by the caller
                left_out, text = _number(answer, "Left-Out"), answer.read(_MOST_BYTES)
                following = f"?since={_number(answer, 'Next')}"
        except urllib.error.HTTPError as error:
            raise ConfigError(
                f"--admin {admin}: status {error.code}; is it a picker of this version?"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() - heard_s > _TRY_AGAIN_FOR_S:
                raise _no_picker(admin, error) from error
        else:
            heard_s = time.monotonic()
            yield text, left_out
        if last:
            return
        left_s = _EVERY_S if until_s is None else min(_EVERY_S, until_s - time.monotonic())
        try:
            time.sleep(max(0.0, left_s))
        except KeyboardInterrupt:
            interrupted = True


def _number(answer: http.client.HTTPResponse, header: str) -> int:
    text = answer.headers.get(header, "")
    return int(text) if text.isdecimal() and len(text) < 20 else 0


def _show(counts: Counts | None) -> None:
    """Show the counts on one line of a terminal, written over each time. None: remove the line."""
    if sys.stderr.isatty():
        text = "\r\033[K" if counts is None else f"\r{counts}; Ctrl-C ends it"
        print(text, end="", file=sys.stderr, flush=True)


# -- epp explain ---------------------------------------------------------------------------------------------


def fetch(admin: str, *, window_s: int) -> dict[str, Any]:
    """Ask the picker. Raises ConfigError if nothing answers, or if the answer is not a picker's account."""
    url = _url(admin, f"explain?window={window_s}")
    try:
        with urllib.request.urlopen(url, timeout=_WITHIN_S) as answer:  # noqa: S310 - http, checked above
            found: dict[str, Any] = decode(answer.read(_MOST_BYTES))
        table(found)
    except (TypeError, LookupError, AttributeError) as error:
        raise _no_picker(admin, f"not an account of missed tokens: {error}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _no_picker(admin, error) from error
    return found


def table(found: dict[str, Any]) -> str:
    """Return a table for people: the causes by size, and what to change."""
    lines = [
        f"{found['requests']:,} requests in the last {found['window_s']:,.0f} s, {found['prompt_tokens']:,} prompt tokens",
        f"{found['hit_ratio']:.1%} of these tokens were expected in the cache of the server that got them",
        "",
        f"{'share of missed':>15}  {'of all':>6}  {'tokens':>12}  why",
    ]
    policies = found.get("policies", ())
    if len(policies) > 1:
        lines[2:2] = [
            f"  {each['policy']}: {each['hit_ratio']:.1%} of {each['prompt_tokens']:,} tokens in {each['requests']:,} requests"
            for each in policies
        ]
    for cause in found["causes"]:
        if not cause["tokens"]:
            continue
        lines.append(
            f"{cause['share_of_missed']:>15.1%}  {cause['share_of_prompt']:>6.1%}  {cause['tokens']:>12,}  {cause['title']}"
        )
        indent = " " * 39
        for server in cause["servers"][:_SHOWN_SERVERS]:
            full = "" if server["full"] is None else f", its cache {server['full']:.0%} full"
            lines.append(f"{indent}{server['name']}: {server['tokens']:,} tokens{full}")
        lines.append(f"{indent}-> {cause['advice']}")
    return "\n".join(lines)
