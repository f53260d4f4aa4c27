"""The rows of the caching documents that need a real model; each gives a table of figures with its id."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from model_server.core.prompt_engine import OfflineScheduler, OnlineScheduler, PromptEngine, run_naive
from model_server.core.request import Request, TokenId
from tests.bench.model_server.engine import runs
from tests.bench.model_server.engine.runs import Bench

Say = Callable[[str], None]
Figures = dict[str, Any]

SHORT_TOKENS, WAVE = 15, 8
"""The report's prompts; its answers are not known."""
PROMPTS, WHOLE_ANSWER = 20, 10


def identical_prompts(bench: Bench, *, repeats: int, say: Say) -> Figures:
    """000-7: items a second with partial blocks cached, over those without, for 64 prompts of 15 tokens in waves of 8."""
    rows = []
    for p, answer in ((1.0, 2), (1.0, 16), (0.1, 16)):
        prompts = _mixed(bench, p)

        def serve(cache: bool, prompts: Sequence[Sequence[TokenId]] = prompts, answer: int = answer) -> float:  # noqa: FBT001 - a side's name
            engine = runs.engine_of(bench, cache=cache, partial_blocks=True)
            made = [runs.request(str(n), tokens, max_tokens=answer) for n, tokens in enumerate(prompts)]
            # In waves: requests of one step cannot find what that step computes.
            waves = [made[at : at + WAVE] for at in range(0, len(made), WAVE)]
            return len(made) / sum(runs.finish(engine, wave) for wave in waves)

        sides = {
            "with": functools.partial(_ignoring_repeat, serve, True),
            "without": functools.partial(_ignoring_repeat, serve, False),
        }
        found = runs.in_turns(sides, repeats=repeats, say=say)
        rows.append(
            {
                "p": p,
                "answer tokens": answer,
                "items/s with": median(found["with"]),
                "items/s without": median(found["without"]),
                "ratio": runs.ratio(found, "with", "without"),
            }
        )
    return {"row": "000-7", "goal": ">= 1.10 at p = 1, >= 0.95 at p = 0.1", "rows": rows}


def _ignoring_repeat(serve: Callable[..., float], *args: object) -> float:
    """The last argument is the repeat's number: the same requests in each."""
    return serve(*args[:-1])


def _mixed(bench: Bench, p: float, *, count: int = 64) -> list[list[TokenId]]:
    """With share p one and the same prompt, else one of its own."""
    same = runs.text_of(bench, "same", tokens=SHORT_TOKENS)
    return [
        same if n % 10 < 10 * p else runs.text_of(bench, f"own {n}", tokens=SHORT_TOKENS)
        for n in range(count)
    ]


def prompts_twice(bench: Bench, *, repeats: int, say: Say) -> Figures:
    """001-6: 20 prompts of 256 to 512 tokens, each twice; the whole run's time with and without the cache, and the hits."""
    sizes = [256 + 256 * n // (PROMPTS - 1) for n in range(PROMPTS)]
    hits: list[float] = []

    def serve(repeat: int, *, cache: bool) -> float:
        prompts = [runs.text_of(bench, f"{repeat} {n}", tokens=size) for n, size in enumerate(sizes)]
        engine = runs.engine_of(bench, cache=cache)
        seconds = 0.0
        for again in range(2):
            made = [
                runs.request(f"{again} {n}", prompt, max_tokens=WHOLE_ANSWER)
                for n, prompt in enumerate(prompts)
            ]
            seconds += runs.finish(engine, made)
            if again and cache:
                hits.append(runs.hit_share(made) / 2)
        return seconds

    sides = {"with": lambda n: serve(n, cache=True), "without": lambda n: serve(n, cache=False)}
    found = runs.in_turns(sides, repeats=repeats, say=say)
    row = {
        "CPU s with": median(found["with"]),
        "CPU s without": median(found["without"]),
        "without / with": runs.ratio(found, "without", "with"),
        "hits of all prompt tokens": median(hits),
    }
    return {"row": "001-6", "goal": ">= 1.6 times, hits 0.49 to 0.50", "rows": [row]}


def unique_prompts(bench: Bench, *, repeats: int, say: Say) -> Figures:
    """001-8: CPU to the first token of prompts that nobody sent before, with the cache over without."""

    def serve(repeat: int, *, cache: bool) -> float:
        engine = runs.engine_of(bench, cache=cache)
        prompts = [runs.text_of(bench, f"unique {repeat} {n}", tokens=512) for n in range(4)]
        return sum(
            runs.finish(engine, [runs.request(str(n), prompt, max_tokens=1)])
            for n, prompt in enumerate(prompts)
        ) / len(prompts)

    sides = {"with": lambda n: serve(n, cache=True), "without": lambda n: serve(n, cache=False)}
    found = runs.in_turns(sides, repeats=2 * repeats, say=say)
    row = {
        "CPU s to first token with": median(found["with"]),
        "without": median(found["without"]),
        "with / without": runs.ratio(found, "with", "without"),
    }
    return {"row": "001-8", "goal": "<= 1.03", "rows": [row]}


def prompt_modes(bench: Bench, *, repeats: int, say: Say) -> Figures:
    """003-5: 64 requests of 856 tokens over 15 distinct prompts, 16 answered; naive, offline and online, with and without."""
    prompts = [runs.text_of(bench, f"distinct {n}", tokens=856) for n in range(15)]
    texts: dict[str, list[list[TokenId]]] = {}
    prefill: dict[str, list[float]] = {}

    def serve(mode: str, entries: int) -> float:
        engine = PromptEngine(
            runs.config_of(bench, cache=False), bench.model, sample=_greedy, prompt_cache_entries=entries
        )
        made = [runs.request(str(n), prompts[n % len(prompts)], max_tokens=16) for n in range(64)]
        started = time.process_time()
        added = _run(mode, engine, made)
        total = time.process_time() - started
        name = f"{mode} {'with' if entries else 'without'}"
        prefill.setdefault(name, []).append(added)
        texts.setdefault(name, [r.token_ids[r.num_prompt_tokens :] for r in made])
        return sum(r.num_output_tokens for r in made) / total

    rows = []
    for mode in ("naive", "offline", "online"):
        sides = {
            f"{mode} {word}": functools.partial(_ignoring_repeat, serve, mode, entries)
            for word, entries in (("with", 256), ("without", 0))
        }
        found = runs.in_turns(sides, repeats=repeats, say=say)
        row = {
            "mode": mode,
            "answer tokens/s with": median(found[f"{mode} with"]),
            "without": median(found[f"{mode} without"]),
            "ratio": runs.ratio(found, f"{mode} with", f"{mode} without"),
        }
        if mode != "naive":
            row["prefill CPU s with"] = median(prefill[f"{mode} with"])
            row["prefill without"] = median(prefill[f"{mode} without"])
            row["prefill ratio"] = runs.ratio(prefill, f"{mode} without", f"{mode} with")
        rows.append(row)
    same = all(text == texts["naive without"] for text in texts.values())
    return {
        "row": "003-5",
        "goal": "prefill >= 4 times faster, tokens/s >= 1.2 times, one text in all modes",
        "same greedy text in all modes": same,
        "rows": rows,
    }


def _greedy(logits: object, _: Request) -> TokenId:
    assert isinstance(logits, torch.Tensor)
    return TokenId(int(logits.argmax()))


def _run(mode: str, engine: PromptEngine, made: Sequence[Request]) -> float:
    """CPU seconds of adding, which is where prompts are computed; of the naive mode, which does not tell them apart, 0."""
    if mode == "naive":
        run_naive(engine, made)
        return 0.0
    started = time.process_time()
    offline, online = OfflineScheduler(engine), OnlineScheduler(engine, max_batch_size=8)
    for one in made:
        (offline if mode == "offline" else online).add(one)
    added = time.process_time() - started
    if mode == "offline":
        offline.run()
    while online.num_unfinished:
        online.step()
    return added
