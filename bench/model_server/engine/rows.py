"""Measures the rows of the caching documents that need a real model. Each row returns a table of figures with
its id.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.model_server.engine import runs
from bench.model_server.engine.runs import Bench, Figures, Kept, Say
from bench.model_server.engine.shapes import prompt_lengths
from model_server.core.cache_options import CacheOptions
from model_server.core.engine import Engine
from model_server.core.request import Request, TokenId
from model_server.core.scheduler import SchedulerLimits
from model_server.runners.hf.runner import HfRunner

PROMPTS, WHOLE_PROMPTS, WHOLE_ANSWER = 20, 200, 10
REQUESTS, DISTINCT, PROMPT_TOKENS, ANSWER_TOKENS = 64, 15, 856, 16
"""The numbers of 003-5. With fewer requests, the number of distinct prompts falls in proportion."""
PLACES = {"naive": 1, "offline": REQUESTS, "online": 8}
"""How many requests each mode of 003-5 computes together (`--max-num-seqs`)."""


def prompts_twice(bench: Bench, kept: Kept, *, repeats: int, say: Say) -> Figures:
    """Measure row 001-6: 20 prompts (200 on a GPU) of 256 to 512 tokens, each twice, with the time of the
    whole run, with and without the cache. The third side of the comparison also caches partial blocks, and so
    finds all of a prompt except its last token.
    """
    count = bench.requests or (WHOLE_PROMPTS if bench.whole else PROMPTS)
    sizes = prompt_lengths(count)
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
            seconds += runs.finish(bench, engine, made)
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
            **kept.ratios("without / with", "001-6 without", f"001-6 {word}"),
            "hits of all prompt tokens": kept.median(f"001-6 hits {word}"),
        }
        for word in ("with", "partial")
    ]
    return {"row": "001-6", "goal": ">= 1.6 times, hits 0.49", "rows": rows}


def unique_prompts(bench: Bench, kept: Kept, *, repeats: int, say: Say) -> Figures:
    """Measure row 001-8: the seconds to the first token of prompts that were never sent before, with the
    cache divided by without it; and the core's share of the steps that answer eight of them together.
    """

    def serve(repeat: int, *, cache: bool) -> float:
        engine = runs.engine_of(bench, cache=cache)
        prompts = [bench.text_of(f"unique {repeat} {n}", 512) for n in range(4)]
        return sum(
            runs.finish(bench, engine, [runs.request(str(n), prompt, max_tokens=1)])
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
    for repeat in range(repeats):
        made = (bench.text_of(f"share {repeat} {n}", 512) for n in range(8))
        asked = [runs.request(str(n), prompt, max_tokens=16) for n, prompt in enumerate(made)]
        runs.finish(bench, runs.engine_of(bench, cache=True), asked, kept)
    row = {
        "core's share of a step": kept.median("001-8 core share"),
        "s to first token with": kept.median("001-8 with"),
        "without": kept.median("001-8 without"),
        **kept.ratios("with / without", "001-8 with", "001-8 without"),
    }
    return {"row": "001-8", "goal": "<= 1.03", "rows": [row]}


@dataclass(slots=True)
class _ModeSide:
    """One mode of 003-5 on one engine, with kept prompts or without."""

    engine: Engine
    requests: Sequence[Request]
    prefill_s: float = 0.0
    """Seconds of the steps that compute prompts. These steps also decode other requests."""
    total_s: float = 0.0

    @property
    def texts(self) -> list[list[TokenId]]:
        return [r.token_ids[r.num_prompt_tokens :] for r in self.requests]

    @property
    def num_prompts_computed(self) -> int:
        return sum(r.num_cached_tokens != r.num_prompt_tokens for r in self.requests)


def prompt_modes(bench: Bench, kept: Kept, *, repeats: int, say: Say) -> Figures:
    """Measure row 003-5: 64 requests of 856 tokens over 15 distinct prompts, with 16 answered tokens, in the
    modes naive, offline and online, with kept prompts and without.
    """
    requests = bench.requests or REQUESTS
    distinct = max(1, round(requests * DISTINCT / REQUESTS))
    whole = (PROMPT_TOKENS + ANSWER_TOKENS) / ANSWER_TOKENS
    """All tokens, as the document's last line counts them, for each token of an answer."""
    texts: list[list[list[TokenId]]] = []
    rows = []
    for mode in bench.modes:
        name = f"003-5 {mode}"
        for _ in range(repeats):
            sides = _in_turns(bench, mode, requests=requests, distinct=distinct)
            for word, side in sides.items():
                kept.add(f"{name} {word}", sum(r.num_output_tokens for r in side.requests) / side.total_s)
                kept.add(f"{name} prefill {word}", side.prefill_s)
                kept.add(f"{name} prompts computed {word}", side.num_prompts_computed)
                say(f"{name} {word}: {kept.series[f'{name} {word}'][-1]:.1f} answer tokens/s")
                texts.append(side.texts)
                kept.add("003-5 same text", float(texts[-1] == texts[0]))
        row: Figures = {
            "mode": mode,
            "requests": requests,
            "prompts computed with": kept.median(f"{name} prompts computed with"),
            "prompts computed without": kept.median(f"{name} prompts computed without"),
            "answer tokens/s with": kept.median(f"{name} with"),
            "without": kept.median(f"{name} without"),
            **kept.ratios("ratio", f"{name} with", f"{name} without"),
            **{f"throughput (total) {w}": whole * kept.median(f"{name} {w}") for w in ("with", "without")},
        }
        over, under = f"{name} prefill without", f"{name} prefill with"
        row["prefill s with"] = kept.median(under)
        row["prefill without"] = kept.median(over)
        row |= {f"prefill {word}": figure for word, figure in kept.ratios("ratio", over, under).items()}
        rows.append(row)
    return {
        "row": "003-5",
        "goal": "prefill >= 4 times faster, tokens/s >= 1.2 times, one text in all modes",
        "same greedy text in all modes": all(kept.series["003-5 same text"]),
        "rows": rows,
    }


def _in_turns(bench: Bench, mode: str, *, requests: int, distinct: int) -> dict[str, _ModeSide]:
    """Let both sides do the same pieces of work. The sides take turns at each piece, not at each run, because
    within a run a busy machine changes by more than the difference that the row looks for.
    """
    prompts = [bench.text_of(f"distinct {n}", PROMPT_TOKENS) for n in range(distinct)]

    def side(own: Bench, *, entries: int) -> _ModeSide:
        config = replace(
            runs.config_of(own, cache=False),
            prompt_cache_entries=entries,
            limits=SchedulerLimits(max_num_seqs=PLACES[mode]),
        )
        made = [
            runs.request(str(n), prompts[n % distinct], max_tokens=ANSWER_TOKENS) for n in range(requests)
        ]
        return _ModeSide(Engine(config, HfRunner(own.model)), made)

    sides = {"with": side(bench, entries=256), "without": side(bench.twin(), entries=0)}
    work = [(one, _steps(one)) for one in sides.values()]
    for turn in itertools.count():
        ended = [_one_step(bench, *one) for one in (work if turn % 2 else work[::-1])]
        if any(ended):
            assert all(ended), "the sides did other work"
            break
    return sides


def _one_step(bench: Bench, side: _ModeSide, steps: Iterator[bool]) -> bool:
    """Do the side's next step, and count its time. Return True if no step was left."""
    started = bench.now_s()
    computes_prompt = next(steps, None)
    if computes_prompt is None:
        return True
    taken_s = bench.now_s() - started
    side.total_s += taken_s
    side.prefill_s += taken_s if computes_prompt else 0.0
    return False


def _steps(side: _ModeSide) -> Iterator[bool]:
    """Add a request when the request before it has its first token. Yield after each step whether the step
    computed a prompt.
    """
    engine, made = side.engine, iter(side.requests)
    newest = next(made)
    engine.add(newest)
    while engine.num_unfinished:
        plan = engine.begin(now=0.0)
        engine.finish(plan, engine.runner.execute(plan), now=0.0)
        yield any(c.num_tokens and c.start < c.request.num_prompt_tokens for c in plan.chunks)
        if newest.first_token_s is not None and (following := next(made, None)) is not None:
            newest = following
            engine.add(newest)
