"""The files of a recording stay within their bound, and each can be read alone."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from epp.observe.recording.file import RecordingFile
from epp.observe.recording.lines import Opening, RecordedRequest, Servers
from epp.observe.recording.recorder import Recorder
from epp.observe.recording.tap import opening_of, servers_of
from tests.unit.observe.recording.recorded import read, record_request, written
from tests.unit.picker.picker_questions import a_picker, text


def test_file_opens_with_policy_and_servers_and_holds_no_text_of_prompt(tmp_path: Path) -> None:
    picker, recorder = a_picker(), Recorder(key=b"k")
    secret = b"the patient's name is Hidden Person. " * 100
    record_request(picker, recorder, secret, salt="a tenant's salt", now=1.0)
    path = tmp_path / "recording.jsonl"
    written(picker, path, recorder.take(), max_bytes=2**20)
    opening, servers, asked = read(path)
    assert isinstance(opening, Opening)
    assert opening.policy["spec"]["rule"] == "least-cost"
    assert isinstance(servers, Servers)
    assert [server.name for server in servers.servers] == list("abcd")
    assert isinstance(asked, RecordedRequest)
    raw = path.read_bytes()
    assert b"Hidden" not in raw
    assert b"salt" not in raw
    assert path.stat().st_mode & 0o077 == 0, "only the owner may read the file"


def test_both_files_stay_within_the_bound_and_can_be_read_alone(
    tmp_path: Path,
) -> None:
    picker, recorder = a_picker(), Recorder(key=b"k")
    for n in range(200):
        record_request(picker, recorder, text(f"{n}", 4096), now=float(n))
    path, most = tmp_path / "recording.jsonl", 2**16
    written(picker, path, recorder.take(), max_bytes=most)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["recording.jsonl", "recording.jsonl.1"]
    assert sum(file.stat().st_size for file in files) <= most + 2 * 4096, "the opening lines come in addition"
    for file in files:
        opening, servers, *asked = read(file)
        assert isinstance(opening, Opening)
        assert isinstance(servers, Servers)
        assert asked
    assert list(read(path))[-1].at_unix_s == 1199.0  # type: ignore[union-attr]


def test_the_recording_of_an_earlier_process_is_kept_as_the_predecessor(tmp_path: Path) -> None:
    picker, recorder, path = a_picker(), Recorder(key=b"k"), tmp_path / "recording.jsonl"
    path.write_bytes(b"of yesterday\n")
    record_request(picker, recorder, text("a"), now=1.0)
    written(picker, path, recorder.take(), max_bytes=2**20)
    assert (tmp_path / "recording.jsonl.1").read_bytes() == b"of yesterday\n"


def test_a_full_disk_costs_lines_and_the_next_ones_begin_a_new_file(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: writes end early, and then fail."""
    picker, recorder, path = a_picker(), Recorder(key=b"k"), tmp_path / "recording.jsonl"
    opening, servers = opening_of(picker), servers_of(picker)
    file, usual = RecordingFile(path, max_bytes=2**20), resource.getrlimit(resource.RLIMIT_FSIZE)
    for n in range(40):
        record_request(picker, recorder, text(f"{n}", 4096), now=float(n))
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, usual[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            file.write(recorder.take(), opening=opening, servers=servers)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    record_request(picker, recorder, text("later"), now=99.0)
    file.write(recorder.take(), opening=opening, servers=servers)
    file.close()
    assert [type(line) for line in read(path)] == [Opening, Servers, RecordedRequest]
    assert path.with_name("recording.jsonl.1").stat().st_size == 8000
