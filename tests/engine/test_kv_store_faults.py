"""A KV store that fails never fails a request."""

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from model_server.cli import main
from model_server.core.request import LoadedPrefix
from model_server.tiers.errors import StoreError
from model_server.tiers.health import FIRST_PAUSE_S
from model_server.tiers.store import PrefixStore
from tests.engine.test_kv_store import BLOCKS, FIRST, SECOND, Serve, Stored, serve
from tests.engine.test_real_server import folder

__all__ = ["folder", "serve"]


def stop_clocks(server: Stored) -> None:
    """The pause after a failure does not end, however slow the machine is."""
    server.tiers.clock = server.tiers.writer.clock = lambda: 0.0


async def test_a_disk_that_cannot_be_read_is_left_alone_for_longer_each_time(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Selective loads read in the middle of a step, after the fetch."""
    async with serve() as server:
        expected, _ = await server.ask(FIRST)
    async with serve(ratio=0.5, cpu_bytes=0) as server:
        now = 0.0
        server.tiers.clock = lambda: now

        async def fails_for(pause_s: float) -> None:
            nonlocal now
            await server.http.post("/reset_prefix_cache")
            assert await server.text(FIRST) == expected
            assert await server.metric("kv_store:usable") == 0
            now += pause_s - 0.1
            assert await server.metric("kv_store:usable") == 0
            now += 0.1
            assert await server.metric("kv_store:usable") == 1

        with monkeypatch.context() as broken:
            broken.setattr(os, "pread", unreadable)
            for pause_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S):
                await fails_for(pause_s)
        await server.http.post("/reset_prefix_cache")
        await server.text(FIRST)
        await server.loader_idle()
        monkeypatch.setattr(os, "pread", unreadable)
        await fails_for(FIRST_PAUSE_S)  # the store was read in between


def unreadable(_: int, __: int, ___: int) -> bytes:
    raise OSError(errno.EIO, "input/output error")


@pytest.mark.parametrize("ratio", [1.0, 0.5])
async def test_a_disk_that_hangs_is_waited_for_once_and_only_for_a_while(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, ratio: float
) -> None:
    async with serve() as server:
        expected, _ = await server.ask(FIRST)
    goes_on, real = threading.Event(), os.pread

    def hangs(number: int, num_bytes: int, offset: int) -> bytes:
        assert goes_on.wait(timeout=120)
        return real(number, num_bytes, offset)

    async with serve(ratio=ratio, cpu_bytes=0) as server:
        stop_clocks(server)
        server.tiers.reader.patience_s = 0.1
        monkeypatch.setattr(os, "pread", hangs)
        texts = await asyncio.gather(*(server.text(FIRST + "!" * number) for number in range(3)))
        assert texts[0] == expected
        assert 1 <= server.tiers.status().load_failures <= (1 if ratio == 1 else 3)
        assert not server.tiers.status().usable
        goes_on.set()


async def test_a_loaded_prefix_holds_exactly_the_memory_that_it_counts(serve: Serve) -> None:
    async with serve() as server:
        await server.ask(FIRST)
        [segment] = server.tiers.store.segments()
        loaded = server.tiers.fetch(segment.place.hashes, first_block=2)
    assert isinstance(loaded, LoadedPrefix)
    assert isinstance(loaded.content, list)
    held = sum(part.untyped_storage().nbytes() for layer in loaded.content for part in layer)
    assert held == loaded.size_bytes


async def test_a_folder_stays_locked_while_a_write_hangs(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on, real = threading.Event(), threading.Event(), os.fsync

    def fsync(number: int) -> None:
        hangs.set()
        assert goes_on.wait(timeout=60)
        real(number)

    async with serve() as server:
        tiers = server.tiers
        monkeypatch.setattr(os, "fsync", fsync)
        await server.text(FIRST)
        assert await asyncio.to_thread(hangs.wait, 60)
        tiers.close(timeout_s=0)
        with pytest.raises(StoreError, match="in use"):
            PrefixStore(tmp_path / "store", tiers.store.layout, capacity_bytes=1 << 30)
        goes_on.set()
        assert tiers.writer.close(timeout_s=60)
    async with serve() as server:
        assert (await server.ask(FIRST))[1] > 300


async def test_a_folder_that_vanishes_loses_only_the_stored_blocks(serve: Serve, tmp_path: Path) -> None:
    async with serve() as server:
        stop_clocks(server)
        expected = [(await server.ask(prompt))[0] for prompt in (FIRST, SECOND)]
        shutil.rmtree(tmp_path / "store")
        answer = await server.complete("Another prompt that is long enough for a block. " * 4)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert [(await server.text(prompt)) for prompt in (FIRST, SECOND)] == expected
        assert server.tiers.writer.drain(timeout_s=60)
        assert server.tiers.status().write_failures == 1


def serve_command(folder: Path, store: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "model_server", "serve", "--port", "0", "--runner", "hf", "--device", "cpu"),
        *("--threads", "1", "--model", str(folder), "--num-blocks", str(BLOCKS), "--kv-store", str(store)),
    ]  # fmt: skip


@contextmanager
def started(folder: Path, store: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start the server in a process and return its port. A failed test kills the process."""
    with subprocess.Popen(serve_command(folder, store), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline().rsplit(":", 1)[1])
        finally:
            process.kill()


def complete(port: int, prompt: str) -> Any:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def test_sigterm_waits_for_the_writer_and_another_model_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    with started(folder, store) as (process, port):
        tokens = complete(port, FIRST)["usage"]["prompt_tokens"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0
    sizes = [path.stat().st_size for path in store.glob("*.kv")]
    assert sum(sizes) > tokens // 16 * 16 * 2 * 2 * 2 * 64 * 4, (
        "all of it: two layers, two KV heads of 64 floats"
    )

    other = tmp_path / "other"
    shutil.copytree(folder, other)
    [weights] = other.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert main(serve_command(other, store)[3:]) == 2
    assert "KV with another model" in capsys.readouterr().err
