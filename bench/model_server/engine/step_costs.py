"""Measures what a prefill and a decode step of a serving load (001-7) cost the engine. From these costs it
computes how much the cache should change the times, on the arrivals that `make bench-serving` sends.

`python -m tests.engine_env run bench.model_server.engine.step_costs --layers 0` measures CPU seconds of
the step that computes a prompt, whole and with its shared part cached, alone and beside three requests that
decode, and of the decode steps of these requests. The engine's core then serves the same requests by these
costs. If a measured ratio differs from the computed one, the cause is noise of the machine, or a cost that
this model lacks. `--costs A B C` takes three costs and measures none.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from bench.model_server.serving.client import Load
from bench.model_server.tables import show
from model_server.core.engine import Engine, EngineConfig
from model_server.core.request import NO_TOKEN, Request, RequestId, TokenId
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.cost import CostModel, CostRunner

SHARED, OWN, ANSWER = 320, 533, 150
_BESIDE = 3


def fitted(*, whole_s: float, rest_s: float, decode_s: float) -> CostModel:
    """Return the costs that give the measured times for a whole prompt and for a prompt whose shared part is
    cached.
    """
    whole = SHARED + OWN
    # This is the time of a token of the own part, divided by the time of a token of the whole prompt.
    later = rest_s / whole_s * whole / OWN
    middles = (whole / 2, SHARED + OWN / 2)
    knee = (middles[1] - middles[0] * later) / (later - 1) if later > 1 else math.inf
    return CostModel(
        prefill_tokens_per_s=whole / whole_s * (1 + middles[0] / knee),
        context_knee_tokens=min(knee, 1e9),
        decode_step_s=decode_s,
        decode_per_request_s=0.0,
        decode_per_context_token_s=0.0,
        interference=0.0,
    )


def counted(load: Load, costs: CostModel, *, cache: bool) -> tuple[float, float]:
    """Return the mean seconds to the first token, and of each further token."""
    engine = _engine(costs, cache=cache)
    engine.add(_request("first", load.first_prompt(name="x"), answer_tokens=2))
    while engine.num_unfinished:
        engine.step(now=0.0)
    prompts = enumerate(load.prompts(name="x"))
    made = [_request(str(n), prompt, answer_tokens=load.answer_tokens) for n, prompt in prompts]
    sent_s = dict(zip((one.request_id for one in made), load.arrivals_s(), strict=True))
    token_s: defaultdict[RequestId, list[float]] = defaultdict(list)
    waiting, now = made[::-1], 0.0
    while waiting or engine.num_unfinished:
        while waiting and sent_s[waiting[-1].request_id] <= now:
            engine.add(waiting.pop())
        if not engine.num_unfinished:
            now = sent_s[waiting[-1].request_id]
            continue
        outputs, now = engine.step(now=now)
        for output in outputs:
            token_s[output.request.request_id].append(now)
    return (
        fmean(times[0] - sent_s[name] for name, times in token_s.items()),
        fmean((times[-1] - times[0]) / (len(times) - 1) for times in token_s.values()),
    )


def ratios(
    costs: CostModel, *, rate_per_s: float, requests: int, seeds: Sequence[int]
) -> tuple[float, float]:
    """Return TTFT and TPOT with the cache, divided by the values without it. They are means over the
    seeds.
    """
    found = []
    for seed in seeds:
        load = Load(
            requests=requests,
            shared_tokens=SHARED,
            own_tokens=OWN,
            answer_tokens=ANSWER,
            rate_per_s=rate_per_s,
            seed=seed,
        )
        with_cache, without = (counted(load, costs, cache=cache) for cache in (True, False))
        found.append([a / b for a, b in zip(with_cache, without, strict=True)])
    ttft, tpot = (fmean(column) for column in zip(*found, strict=True))
    return ttft, tpot


def measured(*, layers: int, repeats: int) -> dict[str, float]:
    """Return the mean CPU seconds of each kind of step. The sides take turns."""
    from bench.model_server.engine import runs  # noqa: PLC0415  # it needs torch, and --costs does not

    bench = runs.prepare(layers=layers, num_blocks=512)
    shared = bench.text_of("shared", SHARED)
    engines = {
        "cached": runs.engine_of(bench, cache=True),
        "whole": runs.engine_of(bench.twin(), cache=False),
    }
    seconds: defaultdict[str, list[float]] = defaultdict(list)

    def step(engine: Engine) -> float:
        started = bench.now_s()
        engine.step(now=0.0)
        return bench.now_s() - started

    def add(engine: Engine, name: str, *, answer_tokens: int) -> None:
        prompt = shared + bench.text_of(name, OWN)
        engine.add(runs.request(name, prompt, max_tokens=answer_tokens))

    for engine in engines.values():
        add(engine, "first", answer_tokens=1)
        step(engine)
    for beside in (0, _BESIDE):
        for engine in engines.values():
            for n in range(beside):
                add(engine, f"beside {n}", answer_tokens=1000)
            for _ in range(beside):  # after this many steps all requests decode
                step(engine)
        for repeat in range(repeats):
            for side, engine in list(engines.items())[:: 1 if repeat % 2 else -1]:
                add(engine, f"{beside} {repeat}", answer_tokens=1)
                seconds[f"prompt {side}, {beside} decode"].append(step(engine))
                if beside:
                    seconds[f"decode step of {beside}, {side}"] += [step(engine) for _ in range(4)]
    return {name: fmean(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.model_server.engine.step_costs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--layers", type=int, default=4, help="use only the first N layers of SmolLM2; 0: all thirty"
    )
    parser.add_argument("--repeats", type=int, default=5, help="number of repeats (default %(default)s)")
    parser.add_argument(
        "--costs",
        type=float,
        nargs=3,
        metavar="S",
        help="use these three costs in seconds, and measure none: a whole prompt, a prompt with its shared part cached, a decode step",
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.15, 0.25], help="requests/s")
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[12, 500], help="numbers of requests in a run"
    )
    args = parser.parse_args()
    costs = args.costs
    if costs is None:
        found = measured(layers=args.layers, repeats=args.repeats)
        show("CPU seconds of a step, means", ["step", "s"], [[name, s] for name, s in found.items()])
        decode = [s for name, s in found.items() if name.startswith("decode")]
        costs = [found["prompt whole, 0 decode"], found["prompt cached, 0 decode"], fmean(decode)]
    model = fitted(whole_s=costs[0], rest_s=costs[1], decode_s=costs[2])
    lines = [
        [
            requests,
            rate,
            *ratios(model, rate_per_s=rate, requests=requests, seeds=range(1, 6) if requests < 100 else [1]),
        ]
        for requests in args.requests
        for rate in args.rates
    ]
    show(
        "Times with the cache divided by times without it, by these costs",
        ["requests", "requests/s", "TTFT", "TPOT"],
        lines,
    )


def _engine(costs: CostModel, *, cache: bool) -> Engine:
    config = EngineConfig(
        num_blocks=4096,
        block_size_tokens=32,
        enable_prefix_caching=cache,
        eos_token_id=NO_TOKEN,
        limits=SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=2048),
    )
    return Engine(config, CostRunner(costs, max_loras=1, next_token=lambda _: TokenId(7)))


def _request(name: str, prompt: Sequence[int], *, answer_tokens: int) -> Request:
    tokens = [TokenId(token) for token in prompt]
    return Request(RequestId(name), tokens, answer_tokens, arrival_s=0.0, ignore_eos=True)


if __name__ == "__main__":
    main()
