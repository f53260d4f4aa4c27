"""The service writes the lines of the recorder in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from epp.observe.recording.file import RecordingFile
from epp.observe.recording.lines import RecordedRequest
from epp.observe.recording.recorder import Recorder
from epp.observe.recording.service import RecordingService
from epp.observe.recording.start import opening_of, servers_of
from tests.unit.observe.recording.recorded import read, record_request
from tests.unit.picker.picker_questions import a_picker, text


async def test_the_service_writes_and_a_failing_disk_is_counted_and_harms_nothing(
    tmp_path: Path,
) -> None:
    picker, recorder = a_picker(), Recorder(key=b"k")
    path = tmp_path / "missing" / "recording.jsonl"
    service = RecordingService(
        recorder,
        RecordingFile(path, max_bytes=2**20),
        opening=lambda: opening_of(picker),
        servers=lambda: servers_of(picker),
    )
    running = asyncio.create_task(service.run())
    record_request(picker, recorder, text("a"), now=1.0)
    while not service.counts["failed"]:  # noqa: ASYNC110 - another thread counts
        await asyncio.sleep(0.01)
    path.parent.mkdir()
    record_request(picker, recorder, text("b"), now=2.0)
    running.cancel()
    service.stop()
    assert service.counts == {"written": 1, "dropped": 0, "failed": 1}
    assert [line for line in read(path) if isinstance(line, RecordedRequest)]


async def test_all_recorded_requests_are_written_before_the_thread_stops(tmp_path: Path) -> None:
    picker, recorder = a_picker(), Recorder(key=b"k")
    path = tmp_path / "recording.jsonl"
    service = RecordingService(
        recorder,
        RecordingFile(path, max_bytes=2**20),
        opening=lambda: opening_of(picker),
        servers=lambda: servers_of(picker),
    )
    for n in range(3):
        record_request(picker, recorder, text(f"{n}"), now=float(n))
    service.stop()
    assert service.counts == {"written": 3, "dropped": 0, "failed": 0}
    assert sum(isinstance(line, RecordedRequest) for line in read(path)) == 3


async def test_the_service_stops_although_the_disk_is_stuck_and_logs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    picker, recorder = a_picker(), Recorder(key=b"k")
    writing, free = threading.Event(), threading.Event()

    class Stuck(RecordingFile):
        def write(self, *_: object, **__: object) -> None:
            writing.set()
            free.wait()

    service = RecordingService(
        recorder,
        Stuck(tmp_path / "recording.jsonl", max_bytes=2**20),
        opening=lambda: opening_of(picker),
        servers=lambda: servers_of(picker),
    )
    record_request(picker, recorder, text("one"), now=1.0)
    running = asyncio.create_task(service.run())
    assert await asyncio.to_thread(writing.wait, 10)
    running.cancel()
    record_request(picker, recorder, text("two"), now=2.0)
    await asyncio.to_thread(service.stop)
    assert "the disk is too slow" in caplog.text
    free.set()
