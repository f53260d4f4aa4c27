"""Shows the progress of a run: on a terminal one line that changes in place, elsewhere a
line now and then.
"""

from __future__ import annotations

import shutil
from typing import Final, TextIO

from bench.demo.load import Run
from bench.tables import percentile

LIVE_EVERY_S: Final = 0.25
PLAIN_EVERY_S: Final = 5.0
_BAR: Final = 24


class Progress:
    """Shows the progress. Call `show` every `interval_s`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self.interval_s = LIVE_EVERY_S if self._live else PLAIN_EVERY_S

    def show(self, rule: str, run: Run, *, now: float) -> None:
        text = line(rule, run, now=now)
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[K{text[:width]}")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """End the line, so that later output starts on its own line."""
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def line(rule: str, run: Run, *, now: float) -> str:
    """Return the state of a run in one line."""
    filled = _BAR * run.done // run.total
    bar = "█" * filled + "░" * (_BAR - filled)
    parts = [f"  {rule:<14} {bar} {run.done:>4}/{run.total}", f"{now - run.started_at:3.0f} s"]
    parts.append(f"{run.in_flight:2} in flight")
    if run.ttfts_s:
        parts.append(f"TTFT p50 {percentile(run.ttfts_s, 0.5) * 1000:,.0f} ms")
    if run.failures:
        parts.append(f"{len(run.failures)} failed")
    return "  ".join(parts)
