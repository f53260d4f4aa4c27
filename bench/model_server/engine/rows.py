"""The rows of the caching documents that need a real model; each gives a table of figures with its id."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.model_server.engine import runs
from bench.model_server.engine.runs import Bench, Kept
from model_server.core.cache_options import CacheOptions
from model_server.core.prompt_engine import OfflineScheduler, OnlineScheduler, PromptEngine, run_naive
from model_server.core.request import Request, TokenId

Say = Callable[[str], None]
Figures = dict[str, Any]

SHORT_TOKENS, WAVE = 15, 8
"""The report's prompts; its answers are not known."""
REPORT = CacheOptions(partial_blocks=True, eviction="last-touch", max_unused_blocks=64)
"""The report's cache: partial blocks, at most K unused ones, evicted from a heap of heaps. 64 requests leave more than K."""
IDENTICAL = ((1.0, 2), (1.0, 16), (0.1, 16))
CURVE = tuple((n / 10, 2) for n in range(1, 11))
"""(p, answer tokens): the row's own points, and the report's second figure."""
PROMPTS, WHOLE_PROMPTS, WHOLE_ANSWER = 20, 200, 10


def identical_prompts(bench: Bench, kept: Kept, *, repeats: int, say: Say) -> Figures:
    """000-7: items a second with partial blocks cached, over those without, for 64 prompts of 15 tokens in waves of 8.

    The sides take turns at each wave, not at each run: what is asked is a few per cent, and a busy machine changes more
    than that within a run.
    """
    return _items(bench, kept, repeats=repeats, say=say, row="000-7", points=IDENTICAL)


def items_by_p(bench: Bench, kept: Kept, *, repeats: int, say: Say) -> Figures:
    """The report's figure 2: as 000-7 for p from 0.1 to 1, two tokens answered."""
    return _items(bench, kept, repeats=repeats, say=say, row="000-figure-2", points=CURVE)


def _items(
    bench: Bench, kept: Kept, *, repeats: int, say: Say, row: str, points: Sequence[tuple[float, int]]
) -> Figures:
    rows = []
    for p, answer in points:
        name = f"{row} p={p} answer={answer}"
        prompts = _mixed(bench, p)
        for _ in range(repeats):
            spent = _waves(bench, prompts, answer=answer)
            for cache, waves in spent.items():
                total_s = sum(one.total_s for one in waves)
                kept.add(f"{name} {cache}", len(prompts) / total_s)
                kept.add(f"{name} core {cache}", sum(one.core_s for one in waves) / total_s)
            say(
                f"{name}: {kept.series[f'{name} True'][-1] / kept.series[f'{name} False'][-1]:.3f} times as fast"
            )
        rows.append(
            {
                "p": p,
                "answer tokens": answer,
                "items/s with": kept.median(f"{name} True"),
                "items/s without": kept.median(f"{name} False"),
                "ratio": kept.ratio(f"{name} True", f"{name} False"),
                "of the repeats": kept.spread(f"{name} True", f"{name} False"),
                "core's share of the time with": kept.median(f"{name} core True"),
                "core's without": kept.median(f"{name} core False"),
            }
        )
    return {"row": row, "goal": ">= 1.10 at p = 1, >= 0.95 at p = 0.1", "rows": rows}


def _waves(
    bench: Bench, prompts: Sequence[Sequence[TokenId]], *, answer: int
) -> dict[bool, list[runs.Spent]]:
    """By whether the cache is on, each wave's time. In waves: requests of one step cannot find what that step computes."""
    twin = bench.twin()
    engines = {
        True: runs.engine_of(bench, cache=True, options=REPORT),
        False: runs.engine_of(twin, cache=False),
    }
    spent: dict[bool, list[runs.Spent]] = {True: [], False: []}
    for at in range(0, len(prompts), WAVE):
        for cache in (True, False) if at // WAVE % 2 else (False, True):
            made = [
                runs.request(str(at + n), tokens, max_tokens=answer)
                for n, tokens in enumerate(prompts[at : at + WAVE])
            ]
            spent[cache].append(runs.finish(bench, engines[cache], made))
    return spent


def _mixed(bench: Bench, p: float, *, count: int = 64) -> list[list[TokenId]]:
    """With share p one and the same prompt, else one of its own. All begin with the same token, as with a BOS token."""
    same = bench.text_of("same", SHORT_TOKENS)
    own = SHORT_TOKENS - 1
    return [same if n % 10 < 10 * p else [same[0], *bench.text_of(f"own {n}", own)] for n in range(count)]


def prompts_twice(bench: Bench, kept: Kept, *, repeats: int, say: Say) -> Figures:
    """001-6: 20 prompts (200 on a GPU) of 256 to 512 tokens, each twice; the whole run's time with and without the cache."""
    count = WHOLE_PROMPTS if bench.whole else PROMPTS
    sizes = uneven_lengths(count)

    def serve(repeat: int, *, cache: bool) -> float:
        prompts = [bench.text_of(f"{repeat} {n}", size) for n, size in enumerate(sizes)]
        engine = runs.engine_of(bench, cache=cache)
        seconds = 0.0
        for again in range(2):
            made = [
                runs.request(f"{again} {n}", prompt, max_tokens=WHOLE_ANSWER)
                for n, prompt in enumerate(prompts)
            ]
            seconds += runs.finish(bench, engine, made).total_s
            if again and cache:
                kept.add("001-6 hits", runs.hit_share(made) / 2)
        return seconds

    kept.in_turns(
        {
            "001-6 with": functools.partial(serve, cache=True),
            "001-6 without": functools.partial(serve, cache=False),
        },
        repeats=repeats,
        say=say,
    )
    tokens = 2 * sum(sizes)
    row = {
        "prompts": count,
        "input tokens/s with": tokens / kept.median("001-6 with"),
        "input tokens/s without": tokens / kept.median("001-6 without"),
        "s with": kept.median("001-6 with"),
        "s without": kept.median("001-6 without"),
        "without / with": kept.ratio("001-6 without", "001-6 with"),
        "of the repeats": kept.spread("001-6 without", "001-6 with"),
        "hits of all prompt tokens": kept.median("001-6 hits"),
    }
    return {"row": "001-6", "goal": ">= 1.6 times, hits 0.49", "rows": [row]}


def uneven_lengths(count: int) -> list[int]:
    """Of prompts as people send them: log-normal about 360 tokens, those outside of 256 to 512 drawn again; always the same."""
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
    """003-5: 64 requests of 856 tokens over 15 distinct prompts, 16 answered; naive, offline and online, with and without."""
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
    """Seconds of adding, which is where prompts are computed; of the naive mode, which does not tell them apart, 0."""
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
