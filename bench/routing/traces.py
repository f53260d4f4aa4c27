"""Turns public request traces into workloads (`--trace PATH`).

Formats, plain or gzip, recognized by their content:
- JSON lines of Mooncake's kind: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids`, one
  for each 512 tokens of the prompt: equal ids are equal text, together with everything before;
- CSV of Azure's kind: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`.

A trace of Azure's kind has no prefixes, so they are made up: half of the requests take one of 200 shared
starts by Zipf, as long as up to two thirds of the prompt.
"""

import csv
import functools
import gzip
import io
import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from bench.routing import workloads
from bench.routing.workloads import SYSTEM_IDS, Spec, Timed
from model_server.sim.prompts import Segment
from model_server.sim.request import SimRequest

_MOST_TOKENS = 120_000
BLOCK_TOKENS: Final = 512
OWN_IDS: Final = 1 << 40
"""Ids of blocks that the file does not name begin here."""


class TraceError(Exception):
    """The file is not a trace. The message says where the fault is, and what is expected
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
                "Traces are JSON lines of Mooncake's kind or CSV of Azure's: bench/routing/traces.py"
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
                "Traces are JSON lines of Mooncake's kind or CSV of Azure's: bench/routing/traces.py"
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


def _from_zero(calls: Sequence[Call]) -> list[Call]:
    """Return the calls in order of time, with the first one at 0."""
    ordered = sorted(calls, key=lambda call: call.at_s)
    return [replace(call, at_s=call.at_s - ordered[0].at_s) for call in ordered]


@functools.cache
def trace_spec(path: Path) -> Spec:
    """Return the trace as a workload: the first requests, with their gaps scaled to a mean of one.

    Each process reads the trace once.
    """
    calls, name = read(path), path.name.split(".")[0]
    if calls[0].blocks[0] >= OWN_IDS:
        return Spec(name=name, kind="open", make=functools.partial(_of_lengths, calls))
    return Spec(name=name, kind="open", block_tokens=BLOCK_TOKENS, make=functools.partial(_of_blocks, calls))


def _timed(at_s: Sequence[float], requests: Sequence[SimRequest]) -> list[Timed]:
    mean = (at_s[-1] - at_s[0]) / max(1, len(at_s) - 1) or 1.0
    gaps = [0.0, *((b - a) / mean for a, b in itertools.pairwise(at_s))]
    return [Timed(gap, request) for gap, request in zip(gaps, requests, strict=True)]


def _of_blocks(calls: Sequence[Call], rng: random.Random, count: int) -> list[Timed]:
    """Make the requests of a trace. The seed exchanges those within a second, because otherwise all seeds
    would give the same requests.
    """
    stamped = sorted((call.at_s + 3 * rng.random(), n) for n, call in enumerate(calls[:count]))
    return _timed([at for at, _ in stamped], [_request(calls[n], n) for _, n in stamped])


def _request(call: Call, number: int) -> SimRequest:
    left = call.prompt_tokens
    segments = []
    for block in call.blocks:
        segments.append(Segment(SYSTEM_IDS + block, min(BLOCK_TOKENS, left)))
        left -= BLOCK_TOKENS
    return SimRequest(
        request_id=number,
        segments=tuple(segments),
        answer=Segment(workloads.OWN_IDS + number, call.output_tokens),
    )


def _of_lengths(calls: Sequence[Call], rng: random.Random, count: int) -> list[Timed]:
    weights = [1 / (rank + 1) for rank in range(200)]
    starts = [rng.randrange(256, 3000) for _ in weights]
    requests = []
    for number, call in enumerate(calls[:count]):
        prompt = min(max(2, call.prompt_tokens), _MOST_TOKENS)
        segments: list[Segment] = []
        if rng.random() < 0.5:
            which = rng.choices(range(200), weights)[0]
            shared = min(starts[which], prompt * 2 // 3)
            if shared:
                segments.append(Segment(SYSTEM_IDS + which, shared))
                prompt -= shared
        own = workloads.OWN_IDS + 2 * number
        requests.append(
            SimRequest(
                request_id=number,
                segments=(*segments, Segment(own, prompt)),
                answer=Segment(own + 1, call.output_tokens),
            )
        )
    return _timed([call.at_s for call in calls[:count]], requests)
