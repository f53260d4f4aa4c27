"""`epp record` reads a picker's admin address and writes a recording that `epp replay` can read."""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from epp.base.errors import ConfigError
from epp.observe.recording import Tap
from epp.picker.picker import Picker
from epp.serve.admin_commands import Counts, fetch, record
from epp.tools.replay.reading import read
from tests.harness.live_page import an_admin
from tests.harness.ports import free_port
from tests.harness.processes import wait_until
from tests.unit.picker.picker_questions import a_picker, ask, serve, text


@dataclass(frozen=True, slots=True)
class Recording:
    """A picker whose requests the command is recording."""

    picker: Picker
    counts: asyncio.Task[Counts]

    def serve(self, *names: object) -> None:
        for number, name in enumerate(names):
            serve(self.picker, ask(text(f"{name}"), stream=True), now=float(number))


@asynccontextmanager
async def recording_to(
    file: Path, *, seconds: float = 30.0, max_bytes: int = 2**20
) -> AsyncIterator[Recording]:
    picker = a_picker()
    tap = Tap(picker)
    admin = an_admin(recording=tap.read, policy=lambda: picker.policy)
    url = f"http://{await admin.start()}"
    try:
        counts = asyncio.create_task(recorded(url, file, seconds=seconds, max_bytes=max_bytes))
        await wait_until(lambda: tap.on, what="the command asks")
        yield Recording(picker, counts)
    finally:
        await admin.stop()


async def recorded(admin: str, file: Path, *, seconds: float = 0.0, max_bytes: int = 2**20) -> Counts:
    return await asyncio.to_thread(record, file, admin=admin, max_bytes=max_bytes, seconds=seconds)


async def test_a_recording_that_the_command_writes_can_be_replayed(tmp_path: Path) -> None:
    file = tmp_path / "recording.jsonl"
    async with recording_to(file, seconds=1.5) as recording:
        recording.serve(*(number % 4 for number in range(20)))
        counts = await recording.counts
    assert (counts.requests, counts.left_out) == (20, 0)
    assert file.stat().st_mode & 0o777 == 0o600
    trace = read([file])
    assert len(trace.calls) == 20
    assert trace.policy == recording.picker.policy
    assert b"text" not in file.read_bytes()


@pytest.mark.parametrize(("max_bytes", "kept"), [(2**20, 9), (5_000, 0)])
async def test_a_recording_ends_before_its_file_is_too_large(
    tmp_path: Path, max_bytes: int, kept: int
) -> None:
    file = tmp_path / "recording.jsonl"
    async with recording_to(file, seconds=1.5, max_bytes=max_bytes) as recording:
        recording.serve(*range(9))
        assert (await recording.counts).requests == kept
    assert file.exists() == bool(kept)


async def test_a_file_that_cannot_be_made_is_named_and_the_picker_goes_on(tmp_path: Path) -> None:
    """One file is there already. Nobody can make the other, as on a disk that is read-only."""
    exists, cannot = tmp_path / "recording.jsonl", Path("/sys/recording.jsonl")
    exists.write_bytes(b"of yesterday")
    for file, fault in ((exists, "File exists; name a new file"), (cannot, r"/sys/recording\.jsonl: ")):
        async with recording_to(file) as recording:
            recording.serve("a")
            with pytest.raises(ConfigError, match=fault):
                await recording.counts
            again = serve(recording.picker, ask(text("a"), stream=True), now=1.0)
            assert again.decision.matched_tokens
    assert exists.read_bytes() == b"of yesterday"


async def test_a_disk_that_becomes_full_is_named_and_its_lines_can_be_replayed(tmp_path: Path) -> None:
    """A bound for the size of files stands for the disk: both write a part, and then fail."""
    file, usual = tmp_path / "recording.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    async with recording_to(file) as recording:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, usual[1]))
        try:
            recording.serve(*range(40))
            with pytest.raises(ConfigError, match=r"recording\.jsonl: File too large; .* is room"):
                await recording.counts
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert file.stat().st_size == 10_000
    assert 0 < len(read([file]).calls) < 40


async def test_a_picker_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"--admin http://127.*: Connection refused; name the admin.address of a running picker",
    ):
        await recorded(f"http://127.0.0.1:{free_port()}", tmp_path / "r.jsonl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("body", [b"", b"[]", b"{}\n", b"<html>", b'{"a":' * 5_000, b"\xff"])
async def test_an_address_that_answers_and_is_no_picker_is_named(tmp_path: Path, body: bytes) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, headers={"Left-Out": "many"})

    app = web.Application()
    app.router.add_get("/recording", answer)
    app.router.add_get("/explain", answer)
    async with TestServer(app) as server:
        admin = str(server.make_url("/"))
        with pytest.raises(ConfigError, match="not a picker of this version"):
            await recorded(admin, tmp_path / "r.jsonl")
        with pytest.raises(ConfigError, match="--admin"):
            await asyncio.to_thread(fetch, admin, window_s=60)
