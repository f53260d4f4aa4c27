"""Measures what exact mode gains on real processes: the default rule with and without it, in turns, on the
same requests.

Four model servers of the cost model publish KV events. In front of them are a real Envoy and a real picker,
fresh for each run. Prompts are token ids, so no tokenizer is needed. There are two situations: caches of half
the size, and two servers that lose their prefix caches half-way without showing this in their metrics.

`python -m bench.routing.live.exact --help`; docs/exact-mode.md has the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import aiohttp
import msgspec
import yaml

from bench.routing.live.generator import Generator, RunClock
from bench.routing.live.run import outcome_of, settled
from bench.routing.live.small import NUM_SERVERS, SHAPE, WORKLOADS, server_flags
from bench.routing.rows import Row, row_of
from model_server.text.tokenizer import Tokenizer
from tests.harness.envoy import EnvoyProcess, running_envoy
from tests.harness.gateway import PickerProcess, config_in, running_picker, write_policy
from tests.harness.model_servers import MODEL, ModelServer, running_model_servers
from tests.harness.processes import wait_until
from tests.unit.kvevents.a_language import write_language

SITUATIONS: Final = {"half the cache": SHAPE.num_blocks // 2, "reset": SHAPE.num_blocks}
"""The situations, and the number of blocks of each server in them."""
_ANYWHERE: Final = "tcp://127.0.0.1:0"
EVENTS: Final = ("--kv-events-endpoint", _ANYWHERE, "--kv-events-replay-endpoint", _ANYWHERE)
_RESETS: Final = 2
"""The number of servers that lose their caches."""


class Run(msgspec.Struct, frozen=True):
    workload: str
    situation: str
    exact: bool
    seed: int
    seconds: float
    row: Row
    predicted: float
    """The share of the prompt tokens that the picker expected in the cache of the chosen server."""
    followed: float
    """The share of the prompts that exact mode mapped."""
    late_s: float
    """The lateness of the generator's event loop, p99."""
    failures: int


@dataclass(frozen=True, slots=True)
class Case:
    workload: str
    situation: str
    exact: bool
    seed: int
    seconds: float
    grace_s: float = 8.0
    """The run goes on for this long after the last arrival."""


async def _sources(servers: Sequence[ModelServer], session: aiohttp.ClientSession) -> list[dict[str, str]]:
    """Return the entries of an endpoints file, with the address of each server's events."""
    entries = []
    for server in servers:
        async with session.get(f"{server.url}/kv_event_sources") as response:
            (source,) = (await response.json()).values()
        entry = {"name": server.name, "address": str(server.address), "model": MODEL}
        entries.append({**entry, "kv_events": source["endpoint"], "kv_replay": source["replay_endpoint"]})
    return entries


@asynccontextmanager
async def _front(
    directory: Path, case: Case, entries: Sequence[dict[str, str]]
) -> AsyncIterator[tuple[PickerProcess, EnvoyProcess]]:
    """Run the picker and the Envoy of this run."""
    sections: dict[str, Any] = {}
    if case.exact:
        folder = write_language(directory / "model")  # required, but never used: prompts are token ids
        sections["exactMode"] = {"models": [{"tokenizerFolder": str(folder)}]}
    config = config_in(directory, policyFile=str(directory / "policy.yaml"), **sections)
    Path(config.endpoints_file).write_text(yaml.safe_dump({"endpoints": list(entries)}))
    write_policy(config, {"rule": "least-cost"})
    async with AsyncExitStack() as stack:
        picker = await stack.enter_async_context(running_picker(config, directory=directory))
        await wait_until(Path(config.envoy.eds_file).exists, what="the picker writes the endpoints file")
        envoy = await stack.enter_async_context(running_envoy(config, directory=directory))
        await envoy.wait_endpoints({entry["address"] for entry in entries})
        yield picker, envoy


async def run(
    case: Case, *, servers: Sequence[ModelServer], session: aiohttp.ClientSession, directory: Path
) -> Run:
    await settled(session, servers)
    for server in servers:
        await server.forget_prefixes(session)
    async with _front(directory, case, await _sources(servers, session)) as (picker, envoy):
        clock = RunClock()
        generator = Generator(
            WORKLOADS[case.workload].workload(seed=case.seed, seconds=case.seconds),
            url=envoy.url,
            model=MODEL,
            session=session,
            clock=clock,
            encode=Tokenizer().encode,
        )
        async with asyncio.TaskGroup() as group:
            if case.situation == "reset":
                group.create_task(_reset(servers[:_RESETS], session, after_s=case.seconds / 2))
            sent = await generator.run(horizon_s=case.seconds + case.grace_s)
        if case.exact:
            await wait_until(partial(_maps, picker), what="exact mode has reported prompts")
        tokens = await picker.metric("epp_prompt_tokens_total")
        return Run(
            **{name: getattr(case, name) for name in ("workload", "situation", "exact", "seed", "seconds")},
            row=row_of(outcome_of(sent)),
            predicted=await picker.metric("epp_matched_tokens_total") / max(1.0, tokens),
            followed=await picker.metric("epp_exact_prompts_total", result="mapped")
            / max(1, len(sent.records)),
            late_s=sent.health.lag_s.quantile(0.99),
            failures=len(sent.failures),
        )


async def _maps(picker: PickerProcess) -> bool:
    return await picker.metric("epp_exact_prompts_total", result="mapped") > 0


async def _reset(servers: Sequence[ModelServer], session: aiohttp.ClientSession, *, after_s: float) -> None:
    await asyncio.sleep(after_s)
    for server in servers:
        await server.forget_prefixes(session)


def _stored(path: Path | None) -> Iterator[Run]:
    if path is not None and path.exists():
        for line in path.read_bytes().splitlines():
            yield msgspec.json.decode(line, type=Run)


async def _runs(cases: Sequence[Case], *, store: Path | None, most_s: float) -> list[Run]:
    until, found = time.monotonic() + most_s, list(_stored(store))
    known = {(r.workload, r.situation, r.exact, r.seed, r.seconds) for r in found}
    todo = [c for c in cases if (c.workload, c.situation, c.exact, c.seed, c.seconds) not in known]
    with tempfile.TemporaryDirectory(prefix="live-exact-") as folder:
        for situation in dict.fromkeys(case.situation for case in todo):
            directory = Path(folder) / situation.replace(" ", "-")
            directory.mkdir()
            flags = [*server_flags(num_blocks=SITUATIONS[situation]), *EVENTS]
            async with (
                running_model_servers(directory, count=NUM_SERVERS, flags=flags) as servers,
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            ):
                for n, case in enumerate(c for c in todo if c.situation == situation):
                    if time.monotonic() > until:
                        break
                    own = directory / f"run-{n}"
                    own.mkdir()
                    found.append(await run(case, servers=servers, session=session, directory=own))
                    if store is not None:
                        with store.open("ab") as file:
                            file.write(msgspec.json.encode(found[-1]) + b"\n")
                    print(case, f"{found[-1].row.ttft_mean_s:.3f} s", file=sys.stderr)
    return found


def table_of(found: Sequence[Run]) -> str:
    """Return pairs of runs with the same requests (approximate -> exact, means), and the ratio of each
    pair.
    """
    lines = [
        "| workload | situation | repeats | hits | predicted | mean TTFT s | TTFT ratio: median (least to most) | of p90 | late p99 s, most | failed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for workload, situation in dict.fromkeys((r.workload, r.situation) for r in found):
        of = {(r.exact, r.seed): r for r in found if (r.workload, r.situation) == (workload, situation)}
        pairs = [(of[False, seed], of[True, seed]) for exact, seed in of if exact and (False, seed) in of]
        if not pairs:
            continue
        columns = [
            f"{fmean(a for a, _ in values):.3f} -> {fmean(b for _, b in values):.3f}"
            for values in (
                [(a.row.hit_ratio, b.row.hit_ratio) for a, b in pairs],
                [(a.predicted, b.predicted) for a, b in pairs],
                [(a.row.ttft_mean_s, b.row.ttft_mean_s) for a, b in pairs],
            )
        ]
        ratios = [b.row.ttft_mean_s / a.row.ttft_mean_s for a, b in pairs]
        p90 = median(b.row.ttft_p90_s / a.row.ttft_p90_s for a, b in pairs)
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        late = max(r.late_s for pair in pairs for r in pair)
        failed = sum(r.failures for pair in pairs for r in pair)
        cells = [
            workload,
            situation,
            str(len(pairs)),
            *columns,
            spread,
            f"{p90:.2f}",
            f"{late:.3f}",
            str(failed),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.routing.live.exact",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=["b2b", "hot"],
        choices=[*WORKLOADS],
        help="workloads to run (default b2b hot)",
    )
    parser.add_argument(
        "--situations",
        nargs="+",
        default=[*SITUATIONS],
        choices=[*SITUATIONS],
        help="situations to run (default: both)",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2], help="seeds to run (default 1 2)")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="seconds of arrivals in a run (default %(default)s)"
    )
    parser.add_argument("--store", type=Path, help="add results to this file, and make only the missing runs")
    parser.add_argument(
        "--most-s", type=float, default=float("inf"), help="begin no run after this many seconds"
    )
    args = parser.parse_args()
    cases = [
        Case(workload, situation, exact, seed, args.seconds)
        for situation in args.situations
        for seed in args.seeds
        for workload in args.workloads
        for exact in ((False, True) if seed % 2 else (True, False))
    ]
    print(table_of(asyncio.run(_runs(cases, store=args.store, most_s=args.most_s))))


if __name__ == "__main__":
    main()
