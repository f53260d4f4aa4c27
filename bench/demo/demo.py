"""Runs the demo from start to end: starts the fleet, runs the workload once for each rule, prints the table,
then keeps the gateway running.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import aiohttp

from bench.demo.address import announced
from bench.demo.counters import cpu_spent_s, scrape
from bench.demo.fleet import DemoError, Fleet, running_fleet
from bench.demo.load import Run, ask, drive
from bench.demo.progress import Progress
from bench.demo.report import RuleFigures, document, footnotes, table
from bench.demo.serving import Serving
from bench.demo.visit import QUESTION, chat_body, invitation
from bench.demo.workload import Workload, make_workload
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
    shape = options.serving.shape(servers=options.servers, requests=options.requests)
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
    return (
        f"{shape.requests} requests by each rule, seed {options.seed}: {shape.users} users of {shape.tenants} tenants, "
        f"conversations of {shape.turns[0]} to {shape.turns[1]} turns.\n"
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
