"""Measures how well a calibrated cost model predicts the server that it was fitted to, on requests that were
not in the fit.

Give the bench the running server (`--url`) and the file that `model-server calibrate` made for it (`--cost`).
The bench starts a server of the cost model with this file, and sends the same requests to both servers in
turns. Prompts are random tokens, so no cache holds a part of them. The lengths, batches and arrivals
are none of those that a calibration uses.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import aiohttp

from bench.model_server.tables import Cell, show, write_json
from model_server.calibrate.client import ServerUnderTest, find_model
from model_server.calibrate.probes import Trace
from tests.harness.model_servers import running_model_servers


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, which is sent `at_s` after the first request of its scenario."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int


def scenarios(*, requests_per_s: float) -> dict[str, list[Asked]]:
    rng = random.Random("held out")
    load: list[Asked] = []
    at_s = 0.0
    for _ in range(10):
        load.append(Asked(at_s, rng.randrange(48, 400), rng.randrange(8, 32)))
        at_s += rng.expovariate(requests_per_s)
    return {
        "one prompt of 300 tokens": [Asked(0, 300, 24)],
        "4 at once of 70, 150, 230, 310": [Asked(0, 70 + 80 * n, 24) for n in range(4)],
        "3 of 100, a fourth of 350 among them": [*(Asked(0, 100, 40) for _ in range(3)), Asked(1.5, 350, 8)],
        f"10 of 48 to 400, {requests_per_s:g} a second": load,
    }


async def served(server: ServerUnderTest, asked: Sequence[Asked]) -> dict[str, float]:
    """Return means over the requests, in seconds: time to the first token, and time for a further token."""

    async def one(request: Asked) -> Trace:
        await asyncio.sleep(request.at_s)
        return await server.ask(request.prompt_tokens, answer_tokens=request.answer_tokens)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(request)) for request in asked]
    traces = [task.result() for task in running]
    return {
        "ttft": fmean(trace.token_s[0] - trace.sent_s for trace in traces),
        "tpot": fmean((trace.token_s[-1] - trace.token_s[0]) / (len(trace.token_s) - 1) for trace in traces),
    }


Measured = dict[str, dict[str, list[dict[str, float]]]]
"""The figures of each repeat as a dict, by scenario and side."""


async def measure(args: argparse.Namespace) -> Measured:
    asked = scenarios(requests_per_s=args.requests_per_s)
    measured: Measured = {name: {"real": [], "modelled": []} for name in asked}
    with tempfile.TemporaryDirectory() as folder:
        async with (
            running_model_servers(Path(folder), count=1, flags=("--cost", str(args.cost))) as [modelled],
            aiohttp.ClientSession(args.url.rstrip("/") + "/") as real_http,
            aiohttp.ClientSession(modelled.url + "/") as modelled_http,
        ):
            sides = {
                name: ServerUnderTest(http, model=(await find_model(http, None))[0], rng=random.Random(7))
                for name, http in (("real", real_http), ("modelled", modelled_http))
            }
            for repeat in range(args.repeats):
                for name, requests in asked.items():
                    for side in list(sides)[:: -1 if repeat % 2 else 1]:
                        measured[name][side].append(await served(sides[side], requests))
    return measured


def lines(measured: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]) -> list[list[Cell]]:
    """Return lines with medians of the repeats. Each ratio is the median of the ratios within the repeats."""
    rows: list[list[Cell]] = []
    for name, sides in measured.items():
        row: list[Cell] = [name]
        for figure in ("ttft", "tpot"):
            real, modelled = ([1e3 * one[figure] for one in sides[side]] for side in ("real", "modelled"))
            ratio = median(m / r for m, r in zip(modelled, real, strict=True))
            row += [median(real), median(modelled), ratio]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.model_server.bench_calibrated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", required=True, help="address of the running server that was calibrated")
    parser.add_argument(
        "--cost",
        type=Path,
        required=True,
        help="the file that `model-server calibrate` wrote for this server",
    )
    parser.add_argument(
        "--requests-per-s", type=float, default=0.5, help="rate of the last scenario (default %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="number of repeats (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    args = parser.parse_args()
    measured = asyncio.run(measure(args))
    write_json(args.json, measured)
    show(
        f"{args.repeats} repeats, the two servers in turns",
        ["requests", "TTFT ms", "modelled TTFT", "ratio", "TPOT ms", "modelled TPOT", "ratio"],
        lines(measured),
    )


if __name__ == "__main__":
    main()
