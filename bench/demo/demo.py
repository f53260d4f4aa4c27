"""Runs the demo from start to end: starts the fleet, runs the workload once for each rule, prints the table,
then keeps the gateway running.
"""

import asyncio
import json
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO, TypeVar

import aiohttp

from bench.demo.address import announced
from bench.demo.counters import cpu_spent_s, scrape
from bench.demo.fleet import DemoError, Fleet, running_fleet
from bench.demo.load import Run, ask, drive
from bench.demo.report import RuleFigures, document, footnotes, table
from bench.demo.serving import Serving
from bench.demo.workload import MODEL, Workload, make_workload
from bench.tables import percentile
from epp.config.policy import RuleName

_T = TypeVar("_T")
_SHOWN_FAILURES: Final = 3
_IDLE_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The checked options of the command line."""

    serving: Serving
    servers: int
    rules: Sequence[RuleName]
    requests: int
    serial: bool
    """Whether one client sends the same prompts again and again."""
    seed: int
    port: int
    envoy: Path
    once: bool
    json_file: Path | None
    keep_logs: bool


async def run_demo(options: Options) -> None:
    """Run until cancelled, or with `once` until the table is printed. Raise DemoError if the demo cannot go
    on.
    """
    began = time.monotonic()
    with _directory(keep=options.keep_logs) as directory:
        what = f" with {options.serving.model}" if options.serving.model else ""
        print(f"Starting {options.servers} model servers{what}, the picker and Envoy ...", flush=True)
        async with running_fleet(
            directory,
            serving=options.serving,
            servers=options.servers,
            rule=options.rules[0],
            gateway_port=options.port,
            envoy=options.envoy,
        ) as fleet:
            print(f"Ready after {time.monotonic() - began:.1f} s: {fleet.envoy.url}\n", flush=True)
            last_request_id = await _guarded(fleet, _compare(fleet, options))
            if not options.once:
                with announced(fleet.envoy.url):
                    print(invitation(fleet, rule=options.rules[-1], request_id=last_request_id), flush=True)
                    await fleet.guard()


async def _compare(fleet: Fleet, options: Options) -> str:
    """Send the same requests by each rule, and print the table. Return the last answered request's id."""
    shape = options.serving.shape(servers=options.servers, requests=options.requests, serial=options.serial)
    workload = make_workload(shape, seed=options.seed)
    print(_about(workload, options), flush=True)
    pid = fleet.picker.process.pid
    before_s = cpu_spent_s(pid)
    await asyncio.sleep(_IDLE_S)
    idle_cpu_share = (cpu_spent_s(pid) - before_s) / _IDLE_S
    nonces = random.Random(options.seed)
    figures = []
    last_request_id = ""
    for rule in options.rules:
        nonce = "".join(nonces.choices("abcdefghijklmnopqrstuvwxyz", k=6))
        found, run = await _measure(fleet, workload, rule=rule, nonce=nonce, idle_cpu_share=idle_cpu_share)
        figures.append(found)
        last_request_id = run.last_request_id or last_request_id
    print(f"\n{table(figures)}\n")
    print(footnotes(figures, reusable_share=workload.reusable_share()), flush=True)
    if options.json_file:
        text = json.dumps(document(figures, seed=options.seed, servers=options.servers), indent=2)
        options.json_file.write_text(f"{text}\n")
    if options.serving.model:
        answer = await ask(fleet.session, f"{fleet.envoy.url}/v1/chat/completions", chat_body(stream=True))
        print(f"Through the gateway: {QUESTION}\n  {answer.text or answer.failure}\n", flush=True)
    return last_request_id


async def _measure(
    fleet: Fleet, workload: Workload, *, rule: RuleName, nonce: str, idle_cpu_share: float
) -> tuple[RuleFigures, Run]:
    """Run the workload once, with cold caches.

    Every prompt begins with the nonce, so no prompt matches the picker's table of the last run. The picker
    keeps the speeds that it has learned, as it does when an operator changes the policy.
    """
    await fleet.use_rule(rule)
    await fleet.forget_prefixes()
    before = await scrape(fleet.session, fleet.server_urls)
    pid = fleet.picker.process.pid
    cpu_before_s = cpu_spent_s(pid)
    run = Run(total=workload.shape.requests, started_at=time.monotonic())
    async with _shown(rule, run):
        await drive(workload, run, url=fleet.envoy.url, nonce=nonce, session=fleet.session)
    duration_s, cpu_s = time.monotonic() - run.started_at, cpu_spent_s(pid) - cpu_before_s
    after = await scrape(fleet.session, fleet.server_urls)
    grown = [a.since(b) for a, b in zip(after, before, strict=True)]
    figures = RuleFigures(
        rule=rule,
        requests=run.total,
        failed=len(run.failures),
        failures=tuple(run.failures[:_SHOWN_FAILURES]),
        duration_s=duration_s,
        queried_tokens=int(sum(c.queried_tokens for c in grown)),
        hit_tokens=int(sum(c.hit_tokens for c in grown)),
        ttfts_s=tuple(run.ttfts_s),
        requests_by_server=tuple(int(c.finished) for c in grown),
        picker_cpu_s=cpu_s,
        picker_idle_cpu_s=idle_cpu_share * duration_s,
    )
    return figures, run


def _about(workload: Workload, options: Options) -> str:
    shape = workload.shape
    cache = options.serving.cache_tokens
    who = (
        f"one client sends the same {shape.conversations} prompts in turn, one request at a time."
        if options.serial
        else f"{shape.users} users of {shape.tenants} tenants, conversations of {shape.turns[0]} to {shape.turns[1]} turns."
    )
    return (
        f"{shape.requests} requests by each rule, seed {options.seed}: {who}\n"
        f"Prefixes in use at a time: about {workload.live_prefix_tokens:,} tokens. "
        f"One server caches {cache:,}, all {options.servers} together {cache * options.servers:,}.\n"
    )


@asynccontextmanager
async def _shown(rule: str, run: Run) -> AsyncIterator[None]:
    """Show the progress of the run until the block ends."""
    progress = Progress(sys.stdout)

    async def keep_showing() -> None:
        while True:
            progress.show(rule, run, now=time.monotonic())
            await asyncio.sleep(progress.interval_s)

    task = asyncio.create_task(keep_showing(), name="progress")
    try:
        yield
        progress.show(rule, run, now=time.monotonic())
    finally:
        task.cancel()
        progress.close()


async def _guarded(fleet: Fleet, work: Coroutine[None, None, _T]) -> _T:
    """Return the outcome of `work`. Raise DemoError if a process of the fleet ends first."""
    working = asyncio.create_task(work, name="demo")
    guard = asyncio.create_task(fleet.guard(), name="guard")
    try:
        await asyncio.wait((working, guard), return_when=asyncio.FIRST_COMPLETED)
        if guard.done():
            guard.result()
        return await working
    except aiohttp.ClientError as error:
        fleet.check()
        raise DemoError(f"a part of the demo does not answer: {error}") from error
    finally:
        working.cancel()
        guard.cancel()
        await asyncio.gather(working, guard, return_exceptions=True)


@contextmanager
def _directory(*, keep: bool) -> Iterator[Path]:
    """Yield a directory for sockets, configuration and logs. It is removed at the end unless the options
    keep it.
    """
    directory = Path(tempfile.mkdtemp(prefix="prefix-gateway-"))
    try:
        yield directory
    finally:
        if keep:
            print(f"Logs and configuration: {directory}", flush=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)


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


QUESTION: Final = "What is the capital of France?"


def chat_body(*, stream: bool = False) -> bytes:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 40,
        "temperature": 0,
    }
    if stream:
        body["stream"] = True
    return json.dumps(body).encode()


def curl_line(url: str) -> str:
    """Return a curl command for a chat request that also prints the answer's headers, which contain the
    request id.
    """
    json_type = shlex.quote("content-type: application/json")
    return f"curl -i {url}/v1/chat/completions -H {json_type} -d {shlex.quote(chat_body().decode())}"


def invitation(fleet: Fleet, *, rule: str, request_id: str) -> str:
    """Return the lines that name every address and the next commands."""
    admin = fleet.admin_url
    places = [
        ("gateway", f"{fleet.envoy.url}  (OpenAI API; routes by {rule})"),
        ("live page", f"{admin}/  (servers, missed tokens, queue, current requests)"),
        ("one decision", f"{admin}/decisions/{request_id or '<x-request-id of an answer>'}"),
        ("metrics", f"{admin}/metrics"),
        (
            "policy",
            f"{fleet.config.policy_file}  (change `rule` there: the picker uses the new rule within a second)",
        ),
        ("Envoy admin", f"{fleet.envoy.admin_url}/"),
        ("model servers", "  ".join(fleet.server_urls)),
    ]
    lines = ["The gateway stays up. Try it:", "", f"  {curl_line(fleet.envoy.url)}", ""]
    lines += [f"  {name:<14} {where}" for name, where in places]
    lines += [
        "",
        "  In another terminal: make load (locust)",
        "  See why prompt tokens were missed, and what other rules would have done (after `. .venv/bin/activate`):",
        f"    epp explain --admin {admin}",
        f"    epp record recording.jsonl --admin {admin}     # while requests come, until Ctrl-C",
        "    epp replay recording.jsonl --rule round-robin --load 1.3",
        "",
        "Ctrl-C ends everything.",
    ]
    return "\n".join(lines)
