"""Recordings of the picker, as `epp replay` reads and runs them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from weakref import finalize

import msgspec

from epp.config.policy import DEFAULT_POLICY
from epp.tools.replay.reading import read
from epp.tools.replay.simulate import ReplaySetting, run
from epp.tools.replay.trace import ReplayError, Trace
from tests.unit.tools.replay.recordings import record

_RUN = 6
"""Requests of a recording that run on simulated servers."""
_RUN_S = 600.0


class Recordings:
    """Each input is a file. If it can be read, some of its requests are replayed."""

    words: Sequence[bytes] = (
        *(b'{"line":"recording","version":1', b'{"line":"request"', b'"chunks":"AAAA"', b'"at_unix_s":'),
        *(b'"prompt_tokens":0', b'"capacity_tokens":0', b"\x1f\x8b"),
    )

    def __init__(self) -> None:
        folder = Path(mkdtemp())
        finalize(self, rmtree, folder)
        self._path = folder / "recording"
        record(self._path, requests=12)
        whole = self._path.read_bytes()
        rows = [json.loads(row) for row in whole.splitlines()]
        short = [row | {"chunks": row["chunks"][:32]} if "chunks" in row else row for row in rows]
        self.documents: Sequence[object] = [short[:6]]
        self.seeds: Sequence[bytes] = [
            *map(self.encode, self.documents),
            gzip.compress(self.encode(short[:4])),
        ]
        self._trace: Trace | None = None

    def encode(self, document: object, /) -> bytes:
        rows = document if isinstance(document, list) else [document]
        return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)

    async def feed(self, data: bytes) -> bool:
        self._path.write_bytes(data)
        try:
            self._trace = read([self._path])
        except ReplayError:
            return False
        return True

    async def check(self) -> None:
        """Run the last recording that was read."""
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        few = replace(trace, calls=[call for call in trace.calls if call.at_s < _RUN_S][:_RUN])
        figures = run(few, trace.policy or DEFAULT_POLICY, ReplaySetting())
        assert figures.counted <= _RUN
