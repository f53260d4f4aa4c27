"""Runs rules of the picker in front of four real vLLM servers. No server behind the gateway is this
project's.

A real Envoy and a real picker, fresh for each run, send multi-turn conversations to the servers, whose caches
are emptied first. The simulator runs the same conversations on engines that are as fast as the servers were
measured to be. The report compares what the picker learned of the servers by the end of a run with the true
values.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from bench.routing.catalog import Config, policy_of_config
from bench.routing.live import vllm_fleet
from bench.routing.live.generator import Generator, outcome_of
from bench.routing.live.vllm_fleet import Setting, Speed
from bench.routing.live.vllm_report import Believed, VllmRun
from bench.routing.picker_router import PickerRouter
from bench.routing.rows import Row, row_of
from epp.config.policy import RuleName
from model_server.sim.fleet import Fleet, FleetPlan
from model_server.weights.known import SMOLLM2, find
from tests.vllm_env import environment
from tests.vllm_env.gateway import VllmGateway, running_vllm_gateway
from tests.vllm_env.server import MODEL_NAME, VllmServer

DEFAULTS: Final[tuple[RuleName, ...]] = ("least-cost", "affinity", "session", "round-robin", "least-load")
SETTING: Final = Setting()
_Pages = dict[str, defaultdict[str, float]]
"""The sum of each series of each server's metrics page."""
_GRACE_S: Final = 40.0
"""A run goes on for this long after the last arrival."""


def stored(path: Path | None) -> Iterator[VllmRun]:
    if path is not None and path.exists():
        for line in path.read_bytes().splitlines():
            yield msgspec.json.decode(line, type=VllmRun)


async def runs_of(
    cases: Sequence[tuple[RuleName, int]],
    *,
    setting: Setting,
    seconds: float,
    model: Path | None,
    store: Path | None,
    most_s: float,
) -> list[VllmRun]:
    """Make a run for each pair of a rule and a seed. No run begins after `most_s` seconds."""
    until, made = time.monotonic() + most_s, list[VllmRun]()
    found, model = environment.require(), model or find(SMOLLM2, progress=_say)
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    with tempfile.TemporaryDirectory(prefix="live-vllm-") as folder:
        async with (
            vllm_fleet.running_vllm_fleet(setting, found, model=model, folder=Path(folder)) as servers,
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        ):
            speed = await vllm_fleet.probe(setting, session, servers)
            _say(f"{len(servers)} servers after {max(s.ready_after_s or 0 for s in servers):.0f} s: {speed}")
            for number, (rule, seed) in enumerate(cases):
                if time.monotonic() >= until:
                    _say(f"{len(cases) - number} runs are left")
                    break
                own = Path(folder) / f"run-{number}"
                own.mkdir()
                run = await one_run(
                    rule,
                    setting=setting,
                    seed=seed,
                    seconds=seconds,
                    speed=speed,
                    servers=servers,
                    session=session,
                    directory=own,
                )
                made.append(run)
                _keep(run, store)
                _say(f"{number + 1}/{len(cases)} {rule}, seed {seed}: {run.live.ttft_mean_s:.3f} s")
    return made


async def one_run(
    rule: RuleName,
    *,
    setting: Setting,
    seed: int,
    seconds: float,
    speed: Speed,
    servers: Sequence[VllmServer],
    session: aiohttp.ClientSession,
    directory: Path,
) -> VllmRun:
    """Make one live run, then the simulated one. Every process except the servers is started for this run,
    and keeps its files in `directory`.
    """
    await vllm_fleet.forget(session, servers)
    before = await _pages(session, servers)
    async with running_vllm_gateway(directory, servers, policy={"rule": rule}) as gateway:
        generator = Generator(
            setting.workload(seed=seed, seconds=seconds),
            url=gateway.envoy.url,
            model=MODEL_NAME,
            session=session,
        )
        sent = await generator.run(horizon_s=seconds + _GRACE_S)
        await asyncio.sleep(2.5)  # the picker reads the servers twice a second, and learns from what it reads
        believed = [await _believed(gateway, server.name) for server in servers]
    after = await _pages(session, servers)
    ended = [record for record in sent.records if record.completed]
    return VllmRun(
        rule=rule,
        seed=seed,
        seconds=seconds,
        serial=setting.serial,
        live=row_of(outcome_of(sent)),
        simulated=simulated(rule, setting=setting, seed=seed, seconds=seconds, speed=speed),
        requests_per_s=len(ended) / sent.ended_s,
        prompt_tokens_per_s=sum(record.num_prompt_tokens for record in ended) / sent.ended_s,
        counted_hit_share=_hit_share(before, after),
        speed=speed,
        true_prefill_tokens_per_s=_rate(before, after),
        true_cache_tokens=setting.cache_tokens,
        true_bytes_per_token=sent.prompt_bytes / max(1, sent.prompt_tokens),
        believed=believed,
        sent_late_p99_s=sent.lag_s.quantile(0.99),
        failures=list(sent.failures),
    )


def simulated(rule: RuleName, *, setting: Setting, seed: int, seconds: float, speed: Speed) -> Row:
    """Return the row of the same conversations on simulated engines."""
    fleet = Fleet(
        FleetPlan(shape=setting.shape(speed), num_servers=setting.servers, horizon_s=seconds + _GRACE_S),
        router=PickerRouter(policy_of_config(Config(rule, ours=rule)), seed=seed),
        workload=setting.workload(seed=seed, seconds=seconds),
        rng=random.Random(seed),
    )
    return row_of(fleet.run())


async def _pages(session: aiohttp.ClientSession, servers: Sequence[VllmServer]) -> _Pages:
    found = {server.name: defaultdict[str, float](float) for server in servers}
    for server in servers:
        async with session.get(f"http://{server.address}/metrics") as response:
            for family in text_string_to_metric_families(await response.text()):
                for sample in family.samples:
                    found[server.name][sample.name] += sample.value
    return found


async def _believed(gateway: VllmGateway, name: str) -> Believed:
    shown = await gateway.endpoint(name)
    return Believed(
        prefill_tokens_per_s=shown["prefill_tokens_per_s"],
        table_tokens=shown["table_capacity_bytes"] / shown["bytes_per_token"],
        bytes_per_token=shown["bytes_per_token"],
    )


def _grown(before: _Pages, after: _Pages, name: str) -> list[float]:
    return [after[server][f"vllm:{name}"] - before[server][f"vllm:{name}"] for server in before]


def _hit_share(before: _Pages, after: _Pages) -> float:
    queried = sum(_grown(before, after, "prefix_cache_queries_total"))
    return sum(_grown(before, after, "prefix_cache_hits_total")) / queried if queried else 0.0


def _rate(before: _Pages, after: _Pages) -> list[float | None]:
    """Return for each server the prompt tokens that it computed in a second of prefill, by its own counters.
    None means that the server had nothing to compute.
    """
    tokens = _grown(before, after, "request_prefill_kv_computed_tokens_sum")
    seconds = _grown(before, after, "request_prefill_time_seconds_sum")
    return [n / s if s else None for n, s in zip(tokens, seconds, strict=True)]


def _keep(run: VllmRun, store: Path | None) -> None:
    if store is not None:
        with store.open("ab") as file:
            file.write(msgspec.json.encode(run) + b"\n")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
