"""Reads public request traces as workloads.

The files are the user's own (`--trace PATH`). The columns tell the format:
- Mooncake JSON lines: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`: one id for each 512
  tokens.
- Azure CSV: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`. It has no prefixes, so they are made up: half of
  the requests take one of 200 shared starts by Zipf, as long as up to two thirds of the prompt.

The files may be plain or gzip.
"""

from __future__ import annotations

import csv
import functools
import gzip
import io
import itertools
import json
import random
from datetime import datetime
from pathlib import Path

from bench.routing.workloads import OWN_IDS, SYSTEM_IDS, Spec, Timed
from model_server.sim.prompts import Segment
from model_server.sim.request import SimRequest

_MOONCAKE_BLOCK = 512
_MOST_TOKENS = 120_000


@functools.cache
def trace_spec(path: Path) -> Spec:
    """Return the trace as a workload: the first requests, with their gaps scaled to a mean of one.

    Each process reads the trace once.
    """
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    name = path.name.split(".")[0]
    if text.lstrip().startswith("{"):
        return Spec(
            name=name,
            kind="open",
            block_tokens=_MOONCAKE_BLOCK,
            make=_Mooncake(text),
        )
    return Spec(name=name, kind="open", make=_Azure(text))


def _timed(at_s: list[float], requests: list[SimRequest]) -> list[Timed]:
    mean = (at_s[-1] - at_s[0]) / max(1, len(at_s) - 1) or 1.0
    gaps = [0.0, *((b - a) / mean for a, b in itertools.pairwise(at_s))]
    return [Timed(gap, request) for gap, request in zip(gaps, requests, strict=True)]


class _Mooncake:
    """Reads a Mooncake trace. The seed exchanges the requests within a second, because otherwise all seeds
    would give the same requests.
    """

    def __init__(self, text: str) -> None:
        self._rows = [json.loads(line) for line in text.splitlines() if line.strip()]

    def __call__(self, rng: random.Random, count: int) -> list[Timed]:
        rows = self._rows[:count]
        stamped = sorted((row["timestamp"] / 1000 + 3 * rng.random(), n) for n, row in enumerate(rows))
        return _timed([at for at, _ in stamped], [self._request(rows[n], n) for _, n in stamped])

    def _request(self, row: dict[str, object], number: int) -> SimRequest:
        left = row["input_length"]
        ids = row["hash_ids"]
        assert isinstance(left, int)
        assert isinstance(ids, list)
        segments = []
        for block in ids:
            tokens = min(_MOONCAKE_BLOCK, left)
            if tokens > 0:
                segments.append(Segment(SYSTEM_IDS + int(block), tokens))
            left -= tokens
        answer = row["output_length"]
        assert isinstance(answer, int)
        return SimRequest(
            request_id=number,
            segments=tuple(segments),
            answer=Segment(OWN_IDS + number, max(1, answer)),
            first_user_segment=min(1, len(segments) - 1),
        )


class _Azure:
    def __init__(self, text: str) -> None:
        rows = list(csv.DictReader(io.StringIO(text)))
        self._at_s = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
        self._sizes = [(int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"]))) for row in rows]

    def __call__(self, rng: random.Random, count: int) -> list[Timed]:
        weights = [1 / (rank + 1) for rank in range(200)]
        starts = [rng.randrange(256, 3000) for _ in weights]
        requests = []
        for number, (context, answer) in enumerate(self._sizes[:count]):
            prompt = min(max(2, context), _MOST_TOKENS)
            segments: list[Segment] = []
            if rng.random() < 0.5:
                which = rng.choices(range(200), weights)[0]
                shared = min(starts[which], prompt * 2 // 3)
                if shared:
                    segments.append(Segment(SYSTEM_IDS + which, shared))
                    prompt -= shared
            requests.append(
                SimRequest(
                    request_id=number,
                    segments=(*segments, Segment(OWN_IDS + 2 * number, prompt)),
                    answer=Segment(OWN_IDS + 2 * number + 1, answer),
                    first_user_segment=len(segments),
                )
            )
        return _timed(self._at_s[: len(requests)], requests)
