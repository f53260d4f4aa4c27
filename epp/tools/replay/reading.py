"""Reads recordings of the picker.

Hashes of requests are comparable within one process of the picker, or between several that share a secret.
Requests of other base models than the most frequent one are left out, since their servers are others. A line
that was cut off at the end of a file is no fault: the picker may have been stopped there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Final

import msgspec

from epp.base.errors import ConfigError
from epp.base.types import unpack_hashes
from epp.config.policy import Chunks, Policy
from epp.observe.recording import VERSION, Line, Opening, RecordedRequest, Servers, decode
from epp.picker.prefix_index.table import end_bytes
from epp.tools.replay.simulate import (
    UNSTATED,
    WARM_UP_SHARE,
    Figures,
    RecordedServer,
    Trace,
    quantile,
)
from model_server.sim.prompts import Segment
from model_server.sim.request import SimRequest

_MOST_CAPACITY_TOKENS: Final = 2**26
"""Largest cache of a simulated server, which makes an object for each block."""
_MOST_DAYS: Final = 7
"""Longest time from the first request to the last, since the simulation runs through all of it."""
_MASK: Final = (1 << 64) - 1
_ASSUMED_TPOT_S: Final = 0.02
_MOST_OUTPUT_TOKENS: Final = 16_384
_MOST_RECORDED_TOKENS: Final = 2**18
"""Bound of the length that an answer reports. Each token is a step of a simulated server."""
_MOST_TOKEN_BYTES: Final = 64.0
_UNSTATED_SERVERS: Final = 8
_ANSWER_NAMES: Final = 1 << 63
_CALM: Final = 0.1
"""The share of the sampled answers that met few prefills and small batches: the fastest ones."""


@dataclass(slots=True)
class _Lines:
    """The lines of all files, in the order in which they were read."""

    requests: list[tuple[RecordedRequest, Chunks]] = field(default_factory=list)
    servers: Servers | None = None
    opening: Opening | None = None
    hashings: set[str] = field(default_factory=set)
    schedule: Chunks | None = None
    """The schedule of the file that is read. None: its opening has not come yet."""

    def add(self, line: Line) -> None:
        """Add a line. A ValueError says what is wrong with it."""
        if isinstance(line, Servers):
            self.servers = line
        elif isinstance(line, Opening):
            if line.version != VERSION:
                raise ValueError(
                    f"the recording has version {line.version} of the format; this program reads version {VERSION}"
                )
            self.opening = line
            self.hashings.add(line.hashing)
            self.schedule = Chunks(
                size_bytes=line.chunk_bytes,
                later_size_bytes=line.later_chunk_bytes,
                later_from_bytes=line.later_from_bytes,
            )
        elif self.schedule is None:
            raise ValueError("a request before the line that opens the recording")
        elif end_bytes(self.schedule, len(unpack_hashes(line.chunks))) > line.prompt_bytes:
            raise ValueError(f"more chunks than a prompt of {line.prompt_bytes} bytes has")
        else:
            self.requests.append((line, self.schedule))


def read(paths: Sequence[Path]) -> Trace:
    """Return one trace from all files. Raises OSError, or ConfigError, which names file, line and fault."""
    lines = _Lines()
    for path in paths:
        lines.schedule = None
        rows = path.read_bytes().split(b"\n")
        for number, row in enumerate(rows, 1):
            if not row.strip():
                continue
            try:
                lines.add(decode(row))
            except ValueError as error:
                if number < len(rows):  # else the line was cut off: a whole line ends with a newline
                    raise ConfigError(
                        f"{path}, line {number}: {error}; name files of `epp record`"
                    ) from error
    if not lines.requests:
        raise ConfigError(f"{', '.join(map(str, paths))}: there are no requests in this recording")
    return _trace_of(lines)


# -- from lines to a trace -----------------------------------------------------------------------------------


def _trace_of(lines: _Lines) -> Trace:
    models = Counter(line.base_model for line, _ in lines.requests)
    model, count = models.most_common(1)[0]
    kept = [(line, schedule) for line, schedule in lines.requests if line.base_model == model]
    kept.sort(key=lambda pair: _came_s(pair[0]))
    requests = [line for line, _ in kept]
    first_s, days = _came_s(requests[0]), (_came_s(requests[-1]) - _came_s(requests[0])) / 86_400
    if days > _MOST_DAYS:
        raise ConfigError(f"the requests lie {days:.0f} days apart; replay {_MOST_DAYS} days at a time")
    remarks = []
    if count < len(lines.requests):
        remarks.append(
            f"{len(lines.requests) - count} requests to other base models than {model!r} are left out"
        )
    if len(lines.hashings) > 1:
        remarks.append("the hashes of the files do not compare: set hashSecretFile to record over restarts")
    sampled = _Sampled.of(requests)
    if sampled.lengths < len(requests):
        guessed = f"at a guessed {_ASSUMED_TPOT_S * 1000:.0f} ms a token"
        remarks.append(
            f"{sampled.lengths} of {len(requests)} answers have a recorded length; the lengths of the others are "
            f"estimated from how long they took, {'by the speed of the sampled answers' if sampled.tpots_s else guessed} "
            "(spec.sampling.share of the policy says how many are sampled)"
        )
    bytes_per_token = sum(a.prompt_bytes for a in requests) / max(1, sum(a.prompt_tokens for a in requests))
    bytes_per_token = min(_MOST_TOKEN_BYTES, max(0.25, bytes_per_token))
    assert lines.opening is not None, "requests come after an opening"
    policy = _policy_of(lines.opening)
    if policy is None:
        remarks.append("the recorded policy is not known to this program: name one with --policy or --rule")
    servers = _servers_of(lines.servers, model)
    if not servers:
        servers = [replace(UNSTATED, name=f"server-{n}") for n in range(_UNSTATED_SERVERS)]
        remarks.append(
            "the recording does not name its servers: the simulated servers are made up (--servers)"
        )
    return Trace(
        calls=[
            (
                _came_s(line) - first_s,
                _request_of(line, schedule, number, sampled=sampled, bytes_per_token=bytes_per_token),
            )
            for number, (line, schedule) in enumerate(kept)
        ],
        servers=servers,
        bytes_per_token=bytes_per_token,
        decode_step_s=quantile(sampled.tpots_s, _CALM) or None,
        policy=policy,
        recorded=_really(requests),
        remarks=tuple(remarks),
    )


def _came_s(line: RecordedRequest) -> float:
    return line.at_unix_s - line.waited_s


def _policy_of(opening: Opening) -> Policy | None:
    try:
        return msgspec.convert(opening.policy, Policy)
    except msgspec.ValidationError:
        return None


def _servers_of(line: Servers | None, model: str) -> list[RecordedServer]:
    return [
        RecordedServer(
            name=server.name,
            capacity_tokens=min(server.capacity_tokens or UNSTATED.capacity_tokens, _MOST_CAPACITY_TOKENS),
            prefill_tokens_per_s=server.prefill_tokens_per_s or UNSTATED.prefill_tokens_per_s,
        )
        for server in (line.servers if line is not None else ())
        if server.model == model
    ]


def _request_of(
    line: RecordedRequest, schedule: Chunks, number: int, *, sampled: _Sampled, bytes_per_token: float
) -> SimRequest:
    """Return a request of which each chunk is a segment, named by its hash. The end of a chunk depends only
    on its position, so equal chunks get equal numbers of tokens. Its last token is whole, so that the text of
    shared chunks does not end before the last of them does.
    """
    chunks = unpack_hashes(line.chunks)
    ends = [end_bytes(schedule, n) for n in range(1, len(chunks) + 1)]
    own = hash((number, line.at_unix_s)) & _MASK
    ends.append(max(line.prompt_bytes, end_bytes(schedule, len(chunks)) + 1))
    tokens = [0, *(ceil(end / bytes_per_token) for end in ends)]
    lengths = [end - start for start, end in pairwise(tokens)]
    lengths[-1] = max(1, lengths[-1])
    return SimRequest(
        request_id=number,
        segments=tuple(map(Segment, [*chunks, own], lengths)),
        answer=Segment(_ANSWER_NAMES | number, sampled.output_tokens(line)),
        adapter=line.adapter,
        tenant=line.tenant,
        priority=line.priority,
    )


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The sampled answers. Only these have a recorded length and first token; the length of all others is
    estimated from the time that they took.
    """

    lengths: int
    """Number of answers with a recorded length."""
    ttfts_s: list[float]
    """In ascending order, as the next list."""
    tpots_s: list[float]
    """Seconds for each token after the first, of all answers with these times."""

    @classmethod
    def of(cls, requests: Sequence[RecordedRequest]) -> _Sampled:
        ttfts, tpots = [], []
        for a in requests:
            if a.ttft_s is not None:
                ttfts.append(a.ttft_s)
                if a.output_tokens is not None and a.output_tokens > 1 and a.ended_s > a.ttft_s:
                    tpots.append((a.ended_s - a.ttft_s) / (a.output_tokens - 1))
        return cls(sum(a.output_tokens is not None for a in requests), sorted(ttfts), sorted(tpots))

    def output_tokens(self, line: RecordedRequest) -> int:
        """Return the length of an answer, as the server reported it, or estimated by the medians."""
        if line.output_tokens is not None:
            return max(1, min(_MOST_RECORDED_TOKENS, line.output_tokens))
        tpot_s = quantile(self.tpots_s, 0.5) or _ASSUMED_TPOT_S
        return min(_MOST_OUTPUT_TOKENS, max(1, round((line.ended_s - quantile(self.ttfts_s, 0.5)) / tpot_s)))


def _really(every: Sequence[RecordedRequest]) -> Figures:
    """Return the recorded figures, without the first tenth of the requests, as in a simulated run. The
    requests of each server are counted completely.
    """
    requests = every[int(WARM_UP_SHARE * len(every)) :]
    sampled = _Sampled.of(requests)
    prompt = sum(a.prompt_tokens for a in requests)
    return Figures.of(
        sampled.ttfts_s,
        sampled.tpots_s,
        hit_ratio=sum(a.matched_tokens for a in requests) / prompt if prompt else 0.0,
        counted=len(requests),
        failed=sum(a.outcome != "ended" or (a.status or 0) >= 400 for a in requests),
        by_server=dict(Counter(a.server for a in every)),
    )
