"""The files of a recording stay within their bound, and each can be read alone."""

from __future__ import annotations

from pathlib import Path

from epp.observe.recording.lines import Opening, RecordedRequest, Servers
from epp.observe.recording.recorder import Recorder
from tests.unit.observe.recording.recorded import read, record_request, written
from tests.unit.picker.picker_questions import a_picker, text


def test_the_file_opens_with_policy_and_servers_and_holds_no_text_of_the_prompt(tmp_path: Path) -> None:
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


def test_the_file_and_its_predecessor_stay_within_the_bound_and_each_can_be_read_alone(
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
