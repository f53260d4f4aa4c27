"""A watched file, in all the ways in which files change."""

import asyncio
import logging
import os
import threading
from pathlib import Path

import pytest

from epp.base.errors import ConfigError
from epp.sources.files.watch import FileWatcher


class PickyFollower:
    """Records the contents that it gets. It refuses contents with the word "bad"."""

    def __init__(self, path: Path, *, applied: bytes | None = None) -> None:
        self.taken: list[bytes] = []
        self.results: list[bool] = []
        self.took = asyncio.Event()
        self.trouble: OSError | None = None
        self.watcher = FileWatcher(
            path, parse=bytes, on_change=self._take, on_result=self.results.append, applied=applied
        )

    def _take(self, content: bytes) -> None:
        if self.trouble is not None:
            raise self.trouble
        if b"bad" in content:
            raise ConfigError(f"{self.watcher.path}: field x: {content.decode()}")
        self.taken.append(content)
        self.took.set()

    async def looks(self, times: int = 2) -> None:
        for _ in range(times):
            await self.watcher.look()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file.yaml"
    path.write_bytes(b"one")
    return path


async def test_the_first_content_is_handed_over_unless_already_in_use(path: Path) -> None:
    follower, ready = PickyFollower(path), PickyFollower(path, applied=b"one")
    await follower.looks(5)
    await ready.looks(5)
    assert follower.taken == [b"one"]
    assert ready.taken == []


@pytest.mark.parametrize("renamed", [False, True])
async def test_any_write_is_seen_even_with_size_and_times_unchanged(path: Path, *, renamed: bool) -> None:
    follower = PickyFollower(path, applied=b"one")
    await follower.looks()
    before = path.stat()
    new = path.with_suffix(".new") if renamed else path
    new.write_bytes(b"two")
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    new.replace(path)
    await follower.looks()
    assert follower.taken == [b"two"]


async def test_the_symlink_swap_of_a_configmap_is_seen(tmp_path: Path) -> None:
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "file.yaml").write_text(version)
    data, path = tmp_path / "..data", tmp_path / "file.yaml"
    data.symlink_to("v1")
    path.symlink_to("..data/file.yaml")
    follower = PickyFollower(path)
    await follower.looks()
    swap = tmp_path / "..data_tmp"
    swap.symlink_to("v2")
    swap.replace(data)
    await follower.looks()
    assert follower.taken == [b"v1", b"v2"]


async def test_a_half_written_file_is_not_handed_over(path: Path) -> None:
    follower = PickyFollower(path, applied=b"one")
    path.write_bytes(b"")
    await follower.looks(1)
    path.write_bytes(b"tw")
    await follower.looks(1)
    path.write_bytes(b"two")
    await follower.looks(1)
    assert follower.taken == []
    await follower.looks(1)
    assert follower.taken == [b"two"]


async def test_a_refused_content_is_logged_once_and_the_next_content_is_tried(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    follower = PickyFollower(path, applied=b"one")
    path.write_bytes(b"bad")
    await follower.looks(6)
    assert follower.results == [False]
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "field x: bad" in errors[0]
    assert errors[0].count(str(path)) == 1
    assert "field x: bad" in follower.watcher.fault
    path.write_bytes(b"one")
    await follower.looks()
    assert follower.taken == [b"one"]
    assert follower.results == [False, True]
    assert follower.watcher.fault == ""


async def test_content_that_cannot_be_used_for_the_moment_is_tried_until_it_can(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    follower = PickyFollower(path, applied=b"one")
    follower.trouble = OSError(30, "Read-only file system")
    path.write_bytes(b"two")
    await follower.looks(8)
    assert follower.taken == []
    assert follower.results == [False]
    assert [r.getMessage() for r in caplog.records] == [
        f"{path} has changed and cannot be used yet; will try again: [Errno 30] Read-only file system"
    ]
    follower.trouble = None
    await follower.looks(4)
    assert follower.taken == [b"two"]
    assert follower.results == [False, True]


async def test_a_missing_file_keeps_the_old_state_and_its_return_is_noticed(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    follower = PickyFollower(path, applied=b"one")
    path.unlink()
    await follower.looks(4)
    path.write_bytes(b"one")
    await follower.looks()
    assert follower.taken == []
    assert follower.results == [False, True]
    path.write_bytes(b"three")
    await follower.looks()
    assert follower.taken == [b"three"]
    assert follower.results == [False, True, True]
    lines = [r.getMessage() for r in caplog.records]
    assert [s for s in lines if "cannot be read" in s] == [
        f"{path} cannot be read; what was read before stays: No such file or directory; create it, or correct the path"
    ]
    assert f"{path} is in use again" in lines


@pytest.mark.parametrize("large", [False, True])
async def test_a_directory_or_a_huge_file_is_not_read(path: Path, *, large: bool) -> None:
    follower = PickyFollower(path, applied=b"one")
    if large:
        os.truncate(path, 17 * 2**20)
    else:
        path.unlink()
        path.mkdir()
    await follower.looks(3)
    assert (follower.taken, follower.results) == ([], [False])


async def test_the_watcher_keeps_looking_by_itself(path: Path) -> None:
    follower = PickyFollower(path)
    task = asyncio.create_task(follower.watcher.run())
    try:
        async with asyncio.timeout(60):
            for content in (b"one", b"two", b"three"):
                follower.took.clear()
                path.write_bytes(content)
                await follower.took.wait()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert follower.taken == [b"one", b"two", b"three"]


async def test_a_content_is_parsed_in_a_thread_and_applied_on_the_loop(path: Path) -> None:
    threads: list[threading.Thread] = []

    def parse(content: bytes) -> str:
        threads.append(threading.current_thread())
        return content.decode()

    def use(text: str) -> None:
        assert text == "one"
        threads.append(threading.current_thread())

    watcher = FileWatcher(path, parse=parse, on_change=use)
    await watcher.look()
    await watcher.look()
    parsed, used = threads
    assert parsed is not used
    assert used is threading.main_thread()
