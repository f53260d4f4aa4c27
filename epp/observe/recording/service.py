"""Passes the recorder's lines to a thread that writes them, a few times a second. Started and stopped by
`app`.

The event loop never waits for the disk: while the thread is busy, the lines stay with the recorder, which
bounds them.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from epp.observe.recording.file import RecordingFile
from epp.observe.recording.lines import Opening, RecordedRequest, Servers
from epp.observe.recording.recorder import Recorder
from epp.picker.events import Ended, PickerEvent

_log = logging.getLogger(__name__)
_FLUSH_S: Final = 0.5
_STOP_WITHIN_S: Final = 2.0
_LOOK_AT_SERVERS_EVERY: Final = 60
"""Flushes between two descriptions of the fleet, whose learned numbers always change."""

_Batch = tuple[Sequence[RecordedRequest], Opening, Servers]


class RecordingService:
    """`opening` and `servers` describe how the picker routes now, and its servers."""

    def __init__(
        self,
        recorder: Recorder,
        file: RecordingFile,
        *,
        opening: Callable[[], Opening],
        servers: Callable[[], Servers],
    ) -> None:
        self._recorder = recorder
        self._file = file
        self._opening = opening
        self._servers = servers
        self._batches: queue.Queue[_Batch | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._write, name="recording", daemon=True)
        self._thread.start()
        self._seen: Servers | None = None
        self._flushes = 0
        self.written = 0
        self.lost = 0
        """Requests whose lines could not be written to the disk."""

    @property
    def counts(self) -> dict[str, int]:
        """The number of requests, by what became of their lines."""
        return {"written": self.written, "dropped": self._recorder.dropped, "failed": self.lost}

    def on_event(self, event: PickerEvent) -> None:
        if isinstance(event, Ended):
            self._recorder.ended(event.request, unix_now_s=time.time())

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            self._hand_over()

    def stop(self) -> None:
        """Write the remaining lines, if the disk accepts them within a moment."""
        try:
            self._batches.put(self._batch(), timeout=_STOP_WITHIN_S)
            self._batches.put(None, timeout=_STOP_WITHIN_S)
        except queue.Full:
            _log.warning("the last lines of the recording were lost, because the disk is too slow")
            return
        self._thread.join(_STOP_WITHIN_S)

    def _hand_over(self) -> None:
        if self._batches.empty():
            batch = self._batch()
            if batch[0]:
                self._batches.put_nowait(batch)

    def _batch(self) -> _Batch:
        if self._seen is None or self._flushes % _LOOK_AT_SERVERS_EVERY == 0:
            self._seen = self._servers()
        self._flushes += 1
        return self._recorder.take(), self._opening(), self._seen

    # -- the thread ------------------------------------------------------------------------------------------

    def _write(self) -> None:
        warned = False
        while (batch := self._batches.get()) is not None:
            lines, opening, servers = batch
            try:
                self._file.write(lines, opening=opening, servers=servers)
            except OSError as error:
                self.lost += len(lines)
                if not warned:
                    _log.warning("requests are not recorded: %s", error)
                warned = True
            else:
                self.written += len(lines)
                warned = False
        self._file.close()
