"""Reads traces from files, or makes them up from a seed. A trace has the times and sizes of requests, and
which beginnings they share. Everything except `read` is pure.

Formats, plain or gzip, recognized by their content:
- JSON lines of Mooncake's kind: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids`, one
  for each 512 tokens of the prompt: equal ids are equal text, together with everything before;
- CSV of Azure's kind: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`. It has no shared beginnings: every
  prompt is new.
"""

from __future__ import annotations

import csv
import gzip
import heapq
import io
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

BLOCK_TOKENS: Final = 512
_MEAN_TURNS: Final = 3.45
_WARM_UP_S: Final = 60.0
OWN_IDS: Final = 1 << 40
"""Ids of blocks that the file does not name begin here."""


class TraceError(Exception):
    """The file is not a trace that can be replayed. The message says where the fault is, and what is expected
    there.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request of a trace."""

    at_s: float
    """Seconds since the first request."""
    blocks: tuple[int, ...]
    """The ids of its prompt's pieces. The last piece may be short."""
    prompt_tokens: int
    output_tokens: int


def read(path: Path) -> list[Call]:
    """Return the calls in order of time, beginning at 0. Raise TraceError if the file is no trace."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read the trace {path}: {error}") from error
    return parse(text, name=str(path))


def parse(text: str, *, name: str) -> list[Call]:
    """Return the calls in a file's content, as `read` does. `name` is for messages."""
    calls = list(_mooncake(text, name) if text.lstrip().startswith("{") else _azure(text, name))
    if not calls:
        raise TraceError(f"{name}: the trace holds no request")
    return _from_zero(calls)


def _mooncake(text: str, name: str) -> Iterator[Call]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            call = Call(
                at_s=_finite(row["timestamp"]) / 1000,
                blocks=tuple(int(block) for block in row["hash_ids"]),
                prompt_tokens=int(row["input_length"]),
                output_tokens=max(1, int(row["output_length"])),
            )
        except (ValueError, KeyError, TypeError) as error:
            fields = "timestamp, input_length, output_length and hash_ids"
            raise TraceError(
                f"{name}, line {number}: not an object with {fields}: {error!r}. "
                "Traces are JSON lines of Mooncake's kind or CSV of Azure's: docs/load-tests.md"
            ) from error
        if call.prompt_tokens < 1 or len(call.blocks) != -(-call.prompt_tokens // BLOCK_TOKENS):
            raise TraceError(
                f"{name}, line {number}: {call.prompt_tokens} tokens are not {len(call.blocks)} blocks of {BLOCK_TOKENS}"
            )
        yield call


def _azure(text: str, name: str) -> Iterator[Call]:
    own = OWN_IDS
    for number, row in enumerate(csv.DictReader(io.StringIO(text)), 2):
        try:
            # Azure writes seven digits of a second, and Python reads six.
            at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            tokens = max(1, int(row["ContextTokens"]))
            output = max(1, int(row["GeneratedTokens"]))
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(
                f"{name}, line {number}: no TIMESTAMP, ContextTokens and GeneratedTokens there: {error!r}. "
                "Traces are JSON lines of Mooncake's kind or CSV of Azure's: docs/load-tests.md"
            ) from error
        count = -(-tokens // BLOCK_TOKENS)
        blocks = tuple(range(own, own + count))
        own += count
        yield Call(at_s=at_s, blocks=blocks, prompt_tokens=tokens, output_tokens=output)


def _finite(value: float) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is not a time")
    return number


def prepared(calls: Sequence[Call], *, most: int, speed: float, scale: float) -> list[Call]:
    """Return the first `most` calls, or all calls if `most` is 0, with gaps divided by `speed` and sizes
    multiplied by `scale`. Equal beginnings stay equal.
    """
    return [
        replace(
            call,
            at_s=call.at_s / speed,
            prompt_tokens=max(1, round(call.prompt_tokens * scale)),
            output_tokens=max(1, round(call.output_tokens * scale)),
        )
        for call in calls[: most or None]
    ]


def generated(count: int, *, seed: int, rate_per_s: float = 3.0) -> list[Call]:
    """Make a trace of our own: conversations that begin at random and in bursts, with eight shared
    beginnings and think time, at about `rate_per_s` requests a second. The same arguments always give the
    same trace.
    """
    rng = random.Random(seed)
    ids = iter(range(1000, 1 << 40))
    shared = [tuple(next(ids) for _ in range(rng.randint(1, 3))) for _ in range(8)]
    weights = [1 / (rank + 1) for rank in range(len(shared))]
    begin_rate = 0.8 / (_MEAN_TURNS / rate_per_s - 0.02)
    made: list[Call] = []
    now = 0.0
    pending: list[tuple[float, int, Call]] = []
    number = 0
    while len(made) < count:
        # Calls before every later conversation are final. Those of the first minute are left out,
        # because all conversations are young then.
        while pending and pending[0][0] <= now and len(made) < count:
            call = heapq.heappop(pending)[2]
            if call.at_s >= _WARM_UP_S:
                made.append(call)
        start = rng.choices(shared, weights)[0]
        turns = 1 + min(11, int(rng.expovariate(1 / 3)))
        for call in _conversation(rng, start, ids, now=now, turns=turns):
            heapq.heappush(pending, (call.at_s, number, call))
            number += 1
        at_once = rng.random() < 0.2  # one conversation in five begins almost together with the one before
        now += rng.uniform(0, 0.2) if at_once else rng.expovariate(begin_rate)
    return _from_zero(made)


def _from_zero(calls: Sequence[Call]) -> list[Call]:
    """Return the calls in order of time, with the first one at 0."""
    ordered = sorted(calls, key=lambda call: call.at_s)
    return [replace(call, at_s=call.at_s - ordered[0].at_s) for call in ordered]


def _conversation(
    rng: random.Random, start: tuple[int, ...], ids: Iterator[int], *, now: float, turns: int
) -> Iterator[Call]:
    """Yield a conversation: each turn's prompt is the prompt before, its answer, and something new."""
    tokens = len(start) * BLOCK_TOKENS
    blocks = start
    for _ in range(turns):
        tokens += rng.randint(40, 600)
        blocks += tuple(next(ids) for _ in range(-(-tokens // BLOCK_TOKENS) - len(blocks)))
        output = rng.randint(16, 96)
        # A short last block holds text of this turn alone. The next turn has another block in its place.
        yield Call(at_s=now, blocks=blocks, prompt_tokens=tokens, output_tokens=output)
        if tokens % BLOCK_TOKENS:
            blocks = (*blocks[:-1], next(ids))
        tokens += output
        now += rng.uniform(1.0, 8.0)
