"""Measures row 003-5, and prints it as its document does: naive, offline and online, with kept prompts and
then without, in one command.

`make bench-schedulers` or `python -m tests.engine_env run bench.model_server.engine.schedulers` serves 64
requests of 856 tokens over 15 distinct prompts, with 16 answered tokens. The naive mode keeps no prompts in
either half, as in the document. Seconds are CPU seconds of one thread, or on a GPU the device's time. Under
each throughput there is the figure that follows from this run's tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.model_server.engine import runs
from bench.model_server.engine.runs import Bench
from bench.model_server.engine.shapes import SHAPES
from model_server.core.prompt_engine import OfflineScheduler, OnlineScheduler, PromptEngine, run_naive
from model_server.core.request import Request, TokenId
from model_server.runners.hf.errors import ModelError

_ONLINE_BATCH = 8


@dataclass(frozen=True, slots=True)
class Load:
    requests: int = 64
    prompt_tokens: int = 856
    distinct: int = 15
    answer_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    requests: int
    prompt_tokens: int
    completion_tokens: int
    add_s: float | None
    """Seconds for adding requests, which includes computing the prompts. None means that the mode does not
    measure this separately.
    """
    total_s: float

    def lines(self) -> list[str]:
        both = self.prompt_tokens + self.completion_tokens
        if self.add_s is None:
            elapsed = [f"Elapsed: {self.total_s:.6f} seconds"]
        else:
            elapsed = [
                f"Elapsed (prefill/add): {self.add_s:.6f} seconds",
                f"Elapsed (decode/run): {self.total_s - self.add_s:.6f} seconds",
                f"Elapsed (total): {self.total_s:.6f} seconds",
            ]
        return [
            f"Requests: {self.requests}",
            *elapsed,
            f"Prompt tokens: {self.prompt_tokens}",
            f"Completion tokens: {self.completion_tokens}",
            f"Total tokens: {both}",
            f"Throughput (completion): {self.completion_tokens / self.total_s:.2f} tokens/s",
            f"Throughput (total): {both / self.total_s:.2f} tokens/s",
        ]


def run(bench: Bench, mode: str, *, keep_prompts: bool, load: Load) -> tuple[Outcome, list[list[TokenId]]]:
    """Return the time of the mode, and the answers."""
    prompts = [bench.text_of(f"distinct {n}", load.prompt_tokens) for n in range(load.distinct)]
    engine = PromptEngine(
        runs.config_of(bench, cache=False),
        bench.model,
        sample=_greedy,
        prompt_cache_entries=256 if keep_prompts else 0,
    )
    made = [
        runs.request(str(n), prompts[n % len(prompts)], max_tokens=load.answer_tokens)
        for n in range(load.requests)
    ]
    started = bench.now_s()
    add_s: float | None = None
    if mode == "naive":
        run_naive(engine, made, use_prompt_cache=False)
    else:
        decode = _added(mode, engine, made)
        add_s = bench.now_s() - started
        decode()
    outcome = Outcome(
        requests=len(made),
        prompt_tokens=sum(r.num_prompt_tokens for r in made),
        completion_tokens=sum(r.num_output_tokens for r in made),
        add_s=add_s,
        total_s=bench.now_s() - started,
    )
    return outcome, [r.token_ids[r.num_prompt_tokens :] for r in made]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.model_server.engine.schedulers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--modes", nargs="+", choices=runs.MODES, default=runs.MODES, help="modes to run (default: all)"
    )
    parser.add_argument(
        "--layers", type=int, default=4, help="use only the first N layers of SmolLM2; 0: all thirty"
    )
    parser.add_argument(
        "--shape", choices=list(SHAPES), help="use random weights of this shape instead of SmolLM2"
    )
    parser.add_argument("--device", default="cpu", help="device for --shape (default %(default)s)")
    for name, default, meaning in (
        ("requests", 64, "number of requests"),
        ("prompt-tokens", 856, "tokens of each prompt"),
        ("distinct", 15, "number of distinct prompts"),
        ("answer-tokens", 16, "tokens of each answer"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{meaning} (default %(default)s)"
        )
    args = parser.parse_args()
    load = Load(args.requests, args.prompt_tokens, args.distinct, args.answer_tokens)
    try:
        bench = (
            runs.prepare_shape(args.shape, device_name=args.device, num_blocks=8192)
            if args.shape
            else runs.prepare(layers=args.layers, num_blocks=8192)
        )
    except ModelError as error:
        parser.error(str(error))
    print(bench.name)
    texts = []
    for keep_prompts in (True, False):
        print(f"\nbenchmarking {'with' if keep_prompts else 'without'} prefix cache")
        for mode in args.modes:
            outcome, text = run(bench, mode, keep_prompts=keep_prompts, load=load)
            texts.append(text)
            print(f"=== {mode} ===", *outcome.lines(), "", sep="\n", flush=True)
    print(f"Same greedy text in all modes: {all(text == texts[0] for text in texts)}")


def _added(mode: str, engine: PromptEngine, made: Sequence[Request]) -> Callable[[], None]:
    """Add all requests. Return a function that decodes them."""
    if mode == "offline":
        offline = OfflineScheduler(engine)
        for one in made:
            offline.add(one)
        return offline.run
    online = OnlineScheduler(engine, max_batch_size=_ONLINE_BATCH)
    for one in made:
        online.add(one)

    def turns() -> None:
        while online.num_unfinished:
            online.step()

    return turns


def _greedy(logits: object, _: Request) -> TokenId:
    assert isinstance(logits, torch.Tensor)
    return TokenId(int(logits.argmax()))


if __name__ == "__main__":
    main()
