"""`python -m bench.demo` as a user starts it: its table, its live phase, and every way in which it ends."""

import json
import re
import shlex
import signal
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.demo.address import running as announced_demos
from tests.harness.processes import ManagedProcess, managed_process, wait_until

pytestmark = pytest.mark.envoy


@asynccontextmanager
async def demo(*options: str, tmp: Path, logs: Path) -> AsyncIterator[ManagedProcess]:
    """Run a demo that has `tmp` for its temporary files. Its output goes to `logs`."""
    command = [sys.executable, "-m", "bench.demo", *options]
    variables = {"TMPDIR": str(tmp), "PYTHONUNBUFFERED": "1"}
    async with managed_process("demo", command, directory=logs, env=variables) as process:
        yield process


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """Return a folder with a short path. The path of a unix socket may have about a hundred characters, and
    pytest's own folders come near that.
    """
    with tempfile.TemporaryDirectory(prefix="demo-") as directory:
        yield Path(directory)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def get_json(url: str, data: bytes | None = None, headers: dict[str, str] | None = None) -> Any:
    request = urllib.request.Request(url, data=data, headers=headers or {})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read()), response.headers


@pytest.mark.core
async def test_neither_rule_fails_the_same_work_and_least_cost_hits_more(
    short_tmp: Path, tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    options = ("--once", "--servers", "2", "--requests", "24", "--json", str(file))
    async with demo(*options, tmp=short_tmp, logs=tmp_path) as running:
        await running.wait_printed("Ready after")
        children = running.children()
        assert len(children) == 4  # These are two servers, the picker and Envoy.
        assert await running.wait(timeout_s=120) == 0, running.output()
    assert not [pid for pid in children if alive(pid)]
    assert not list(short_tmp.iterdir())
    assert re.search(r"token hit rate +\d+\.\d % +\d+\.\d % +\d+\.\d\dx", running.output())
    assert re.search(r"requests by server  s1 +12 +\d+", running.output())

    figures = json.loads(file.read_text())
    by_turn, by_cost = figures["rules"]
    assert (by_turn["rule"], by_cost["rule"]) == ("round-robin", "least-cost")
    for entry in (by_turn, by_cost):
        assert (entry["requests"], entry["failed"], entry["ttft_n"]) == (24, 0, 16)
        assert sum(entry["requests_by_server"]) == 24
        assert 0 < entry["ttft_p50_s"] <= entry["ttft_p90_s"]
        assert entry["picker_cpu_s"] > 0
    assert by_turn["requests_by_server"] == [12, 12]
    # The prompts are the same except for the nonces. The letters of a nonce may make one token more or less.
    assert by_turn["queried_tokens"] == pytest.approx(by_cost["queried_tokens"], rel=0.001)
    assert by_cost["token_hit_rate"] > by_turn["token_hit_rate"]


async def test_the_demo_stays_up_and_shows_the_decision_about_its_curl_line(
    short_tmp: Path, tmp_path: Path
) -> None:
    async with demo(
        "--servers", "2", "--requests", "3", "--rules", "least-cost", tmp=short_tmp, logs=tmp_path
    ) as running:
        printed = await running.wait_printed("Ctrl-C ends everything")
        (place,) = [place for place in announced_demos() if place.pid == running.pid]
        assert re.search(rf"gateway +{re.escape(place.gateway)} ", printed), "`make load` finds it"
        words = shlex.split(next(line for line in printed.splitlines() if line.strip().startswith("curl ")))
        name, value = words[words.index("-H") + 1].split(": ")
        data = words[words.index("-d") + 1].encode()
        answer, headers = get_json(
            next(word for word in words if word.startswith("http")), data, {name: value}
        )
        assert answer["choices"][0]["message"]["content"]

        shown = re.search(r"one decision +(http://\S+/decisions/)(\S+)", printed)
        assert shown is not None
        for request_id in (shown.group(2), headers["x-request-id"]):
            decision, _ = get_json(shown.group(1) + request_id)
            assert decision["rule"] == "least-cost"
            assert decision["chosen"] in {"server-1", "server-2"}

        children = running.children()
        running.signal(signal.SIGTERM)
        assert await running.wait(timeout_s=120) == 0, running.output()
    assert "The demo has ended" in running.output()
    assert running.pid not in {place.pid for place in announced_demos()}
    assert not [pid for pid in children if alive(pid)]
    assert not list(short_tmp.iterdir())


async def test_ctrl_c_in_the_middle_ends_everything_with_exit_status_of_signal(
    short_tmp: Path, tmp_path: Path
) -> None:
    async with demo("--once", "--servers", "1", "--keep-logs", tmp=short_tmp, logs=tmp_path) as running:
        await running.wait_printed("Ready after")
        children = running.children()
        running.signal(signal.SIGINT)
        assert await running.wait(timeout_s=120) == 128 + signal.SIGINT, running.output()
    assert not [pid for pid in children if alive(pid)]
    (kept,) = short_tmp.iterdir()
    assert str(kept) in running.output()
    assert {"envoy.yaml", "config.yaml", "picker.err", "server-1.out"} <= {f.name for f in kept.iterdir()}


async def test_a_demo_that_is_killed_takes_everything_with_it(short_tmp: Path, tmp_path: Path) -> None:
    async with demo("--servers", "1", tmp=short_tmp, logs=tmp_path) as running:
        await running.wait_printed("Ready after")
        children = running.children()
        assert len(children) == 3
        running.signal(signal.SIGKILL)
        await wait_until(lambda: not any(map(alive, children)), what="all children are gone")
