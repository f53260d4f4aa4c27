"""Runs one engine in its own process: reads the rounds of a row from its input, one JSON line each time, and
writes the results.

The engines' environments share no package of ours, so this module needs only the standard library. CPU
seconds are those of the whole process. An engine that computes in another process would look as if it cost
nothing; `run` refuses such an engine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, runtime_checkable

from bench.model_server.peers.work import Prompt, Round, Turn


class PeerEngine(Protocol):
    version: str

    def forget(self) -> None:
        """Empty the prefix cache. The caller makes sure that no request is running."""

    def answer(self, prompts: Sequence[Prompt], *, answer_tokens: int) -> tuple[list[list[int]], int]:
        """Return greedy answers of exactly this many tokens, in the order of the prompts, and how many prompt
        tokens the cache had.
        """


@runtime_checkable
class SteppedEngine(Protocol):
    """An engine that accepts requests while it works, and computes in the caller's thread."""

    def begin(self, number: int, prompt: Prompt, *, answer_tokens: int) -> None:
        """Start a greedy request of exactly this many tokens."""

    def step(self) -> dict[int, list[int]]:
        """Return the tokens that this step gave, by request. The dict is empty if there was nothing to do."""

    def hit_tokens(self, number: int) -> int:
        """Return the prompt tokens of an ended request that the cache had."""


def main(make: Callable[..., PeerEngine]) -> None:
    """Run the engine. `make(folder, cache=..., num_blocks=...)` returns the model in `folder`, in float32, on
    the CPU.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="folder of the model")
    parser.add_argument("--num-blocks", type=int, required=True, help="number of blocks of the cache")
    parser.add_argument("--cache", action="store_true", help="turn the prefix cache on")
    args = parser.parse_args()
    # Engines print text. This text goes to the log. The lines of the protocol go to the original output.
    protocol = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    status = 1
    try:
        engine = make(args.folder, cache=args.cache, num_blocks=args.num_blocks)
        print(json.dumps({"version": engine.version}), file=protocol)
        for line in sys.stdin:
            rounds = [Round(**one) for one in json.loads(line)]
            turn = run(engine, rounds)
            _check_alone()
            print(json.dumps(asdict(turn)), file=protocol)
        status = 0
    except BaseException:  # noqa: BLE001 - the log has it, and the process ends
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # threads of engines would keep the process alive


def run(engine: PeerEngine, rounds: Sequence[Round]) -> Turn:
    engine.forget()
    cpu_s: list[float] = []
    wall_s: list[float] = []
    answers: list[list[int]] = []
    hits: list[int] = []
    token_s: list[list[float]] = []
    elapsed_s = 0.0
    for one in rounds:
        cpu, wall = time.process_time(), time.perf_counter()
        if one.arrivals_s:
            tokens, hit, token_s, elapsed_s = _at_moments(engine, one)
        else:
            tokens, hit = engine.answer(one.prompts, answer_tokens=one.answer_tokens)
        cpu_s.append(time.process_time() - cpu)
        wall_s.append(time.perf_counter() - wall)
        if any(len(answer) != one.answer_tokens for answer in tokens):
            raise RuntimeError(f"answers of {sorted({len(answer) for answer in tokens})} tokens came")
        answers += tokens
        hits.append(hit)
    return Turn(cpu_s, wall_s, hits, answers, token_s, elapsed_s)


def _at_moments(engine: PeerEngine, one: Round) -> tuple[list[list[int]], int, list[list[float]], float]:
    """Return answers, hits, token times, and the whole time. The clock is the CPU time of this process, and
    time in which there is nothing to compute is skipped. So other programs on the machine delay no
    request.
    """
    if not isinstance(engine, SteppedEngine):
        raise TypeError(f"{type(engine).__name__} takes no requests while it works")
    answers: list[list[int]] = [[] for _ in one.prompts]
    token_s: list[list[float]] = [[] for _ in one.prompts]
    began_s, skipped_s, waiting, open_requests = time.process_time(), 0.0, 0, 0
    while waiting < len(one.prompts) or open_requests:
        now_s = time.process_time() - began_s + skipped_s
        if not open_requests and one.arrivals_s[waiting] > now_s:
            skipped_s += one.arrivals_s[waiting] - now_s
            now_s = one.arrivals_s[waiting]
        while waiting < len(one.prompts) and one.arrivals_s[waiting] <= now_s:
            engine.begin(waiting, one.prompts[waiting], answer_tokens=one.answer_tokens)
            waiting, open_requests = waiting + 1, open_requests + 1
        came = engine.step()
        now_s = time.process_time() - began_s + skipped_s
        for number, tokens in came.items():
            answers[number] += tokens
            token_s[number] += [now_s - one.arrivals_s[number]] * len(tokens)
            open_requests -= len(answers[number]) == one.answer_tokens
    hits = sum(map(engine.hit_tokens, range(len(one.prompts))))
    return answers, hits, token_s, time.process_time() - began_s + skipped_s


def _check_alone() -> None:
    """Check that no other process computes, because the CPU time of other processes would not be counted."""
    tasks = Path("/proc/self/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    if children:
        raise RuntimeError(f"the engine computes in other processes too: {children}")
