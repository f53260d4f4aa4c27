"""The rows of the caching documents that need a real model; each gives a table of figures with its id."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence

import torch

from bench.model_server.engine import runs
from bench.model_server.engine.runs import Bench, Figures, Kept, Say
from model_server.core.cache_options import CacheOptions
from model_server.core.prompt_engine import OfflineScheduler, OnlineScheduler, PromptEngine, run_naive
from model_server.core.request import Request, TokenId

PROMPTS, WHOLE_PROMPTS, WHOLE_ANSWER = 20, 200, 10


def prompts_twice(bench: Bench, kept: Kept, *, repeats: int, say: Say) -> Figures:
    """001-6: 20 prompts (200 on a GPU) of 256 to 512 tokens, each twice;
    the whole run's time with and without the cache.

    The third side caches partial blocks too, and so finds all of a prompt but its last token.
    """
    count = WHOLE_PROMPTS if bench.whole else PROMPTS
    sizes = uneven_lengths(count)
    options = {"with": CacheOptions(), "partial": CacheOptions(partial_blocks=True), "without": None}

    def serve(repeat: int, *, word: str) -> float:
        prompts = [bench.text_of(f"{repeat} {n}", size) for n, size in enumerate(sizes)]
        engine = runs.engine_of(bench, cache=options[word] is not None, options=options[word])
        seconds = 0.0
        for again in range(2):
            made = [
                runs.request(f"{again} {n}", prompt, max_tokens=WHOLE_ANSWER)
                for n, prompt in enumerate(prompts)
            ]
            seconds += runs.finish(bench, engine, made).total_s
        kept.add(f"001-6 hits {word}", runs.hit_share(made) / 2)
        return seconds

    sides = {f"001-6 {word}": functools.partial(serve, word=word) for word in options}
    kept.in_turns(sides, repeats=repeats, say=say)
    tokens = 2 * sum(sizes)
    rows: list[Figures] = [
        {
            "cache": {"with": "full blocks", "partial": "partial blocks too"}[word],
            "prompts": count,
            "input tokens/s with": tokens / kept.median(f"001-6 {word}"),
            "input tokens/s without": tokens / kept.median("001-6 without"),
            "s with": kept.median(f"001-6 {word}"),
            "s without": kept.median("001-6 without"),
            "without / with": kept.ratio("001-6 without", f"001-6 {word}"),
            "of the repeats": kept.spread("001-6 without", f"001-6 {word}"),
            "hits of all prompt tokens": kept.median(f"001-6 hits {word}"),
        }
        for word in ("with", "partial")
    ]
    return {"row": "001-6", "goal": ">= 1.6 times, hits 0.49", "rows": rows}


def uneven_lengths(count: int) -> list[int]:
    """Of prompts as people send them: log-normal about 360 tokens, those outside of 256 to 512 drawn again;
    always the same."""
    rng = random.Random("001-6")
    drawn = (round(rng.lognormvariate(math.log(360), 0.5)) for _ in itertools.count())
    return list(itertools.islice((tokens for tokens in drawn if 256 <= tokens <= 512), count))


def unique_prompts(bench: Bench, kept: Kept, *, repeats: int, say: Say) -> Figures:
    """001-8: seconds to the first token of prompts that nobody sent before, with the cache over without."""

    def serve(repeat: int, *, cache: bool) -> float:
        engine = runs.engine_of(bench, cache=cache)
        prompts = [bench.text_of(f"unique {repeat} {n}", 512) for n in range(4)]
        return sum(
            runs.finish(bench, engine, [runs.request(str(n), prompt, max_tokens=1)]).total_s
            for n, prompt in enumerate(prompts)
        ) / len(prompts)

    kept.in_turns(
        {
            "001-8 with": functools.partial(serve, cache=True),
            "001-8 without": functools.partial(serve, cache=False),
        },
        repeats=2 * repeats,
        say=say,
    )
    row = {
        "s to first token with": kept.median("001-8 with"),
        "without": kept.median("001-8 without"),
        "with / without": kept.ratio("001-8 with", "001-8 without"),
        "of the repeats": kept.spread("001-8 with", "001-8 without"),
    }
    return {"row": "001-8", "goal": "<= 1.03", "rows": [row]}


def prompt_modes(bench: Bench, kept: Kept, *, repeats: int, say: Say) -> Figures:
    """003-5: 64 requests of 856 tokens over 15 distinct prompts, 16 answered;
    naive, offline and online, with and without."""
    prompts = [bench.text_of(f"distinct {n}", 856) for n in range(15)]
    texts: list[list[list[TokenId]]] = []

    def serve(_: int, *, mode: str, word: str) -> float:
        entries = 256 if word == "with" else 0
        engine = PromptEngine(
            runs.config_of(bench, cache=False), bench.model, sample=_greedy, prompt_cache_entries=entries
        )
        made = [runs.request(str(n), prompts[n % len(prompts)], max_tokens=16) for n in range(64)]
        started = bench.now_s()
        added = _run(mode, engine, made, bench=bench)
        total = bench.now_s() - started
        kept.add(f"003-5 {mode} prefill {word}", added)
        texts.append([r.token_ids[r.num_prompt_tokens :] for r in made])
        kept.add("003-5 same text", float(texts[-1] == texts[0]))
        return sum(r.num_output_tokens for r in made) / total

    rows = []
    for mode in ("naive", "offline", "online"):
        name = f"003-5 {mode}"
        sides = {
            f"{name} {word}": functools.partial(serve, mode=mode, word=word) for word in ("with", "without")
        }
        kept.in_turns(sides, repeats=repeats, say=say)
        row: Figures = {
            "mode": mode,
            "answer tokens/s with": kept.median(f"{name} with"),
            "without": kept.median(f"{name} without"),
            "ratio": kept.ratio(f"{name} with", f"{name} without"),
            "of the repeats": kept.spread(f"{name} with", f"{name} without"),
        }
        if mode != "naive":
            row["prefill s with"] = kept.median(f"{name} prefill with")
            row["prefill without"] = kept.median(f"{name} prefill without")
            row["prefill ratio"] = kept.ratio(f"{name} prefill without", f"{name} prefill with")
        rows.append(row)
    return {
        "row": "003-5",
        "goal": "prefill >= 4 times faster, tokens/s >= 1.2 times, one text in all modes",
        "same greedy text in all modes": all(kept.series["003-5 same text"]),
        "rows": rows,
    }


def _greedy(logits: object, _: Request) -> TokenId:
    assert isinstance(logits, torch.Tensor)
    return TokenId(int(logits.argmax()))


def _run(mode: str, engine: PromptEngine, made: Sequence[Request], *, bench: Bench) -> float:
    """Seconds of adding, which is where prompts are computed;
    of the naive mode, which does not tell them apart, 0."""
    if mode == "naive":
        run_naive(engine, made)
        return 0.0
    started = bench.now_s()
    offline, online = OfflineScheduler(engine), OnlineScheduler(engine, max_batch_size=8)
    for one in made:
        (offline if mode == "offline" else online).add(one)
    added = bench.now_s() - started
    if mode == "offline":
        offline.run()
    while online.num_unfinished:
        online.step()
    return added
