"""Measures the hash table report's rows (000) on an engine: items a second with partial blocks cached,
divided by those without.

Requests come in waves of 8, since requests of one step cannot find what the same step computes. The sides
take turns at each wave, not at each run: the expected difference is a few per cent, and a busy machine
changes by more than that within a run. The command calls this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench.model_server.engine import answer_costs, runs
from bench.model_server.engine.runs import Bench, Figures, Kept, Say
from model_server.core.cache_options import CacheOptions
from model_server.core.request import Request, TokenId
from model_server.core.sampling import GREEDY, SamplingParams

SHORT_TOKENS, WAVE = 15, 8
"""The tokens of the report's prompts, and the requests of a wave. The report does not state the lengths of
its answers.
"""
REPORT = CacheOptions(partial_blocks=True, eviction="last-touch", max_unused_blocks=64)
"""The report's cache: partial blocks, at most K unused blocks, and eviction from a heap of heaps. 64 requests
leave more than K blocks behind.
"""
IDENTICAL = ((1.0, 2), (1.0, 16), (0.1, 16))
"""The points (p, answered tokens) of row 000-7."""
CURVE = tuple((n / 10, 2) for n in range(1, 11))
"""The points (p, answered tokens) of the report's figure 2."""
ANSWERS = (2, 4, 8, 16, 32, 56)
"""With 56 answered tokens after the report's question of 5 tokens, 8.14 % of all tokens were found."""
GOAL = 1.10


@dataclass(slots=True)
class Waves:
    """The waves of one side. A wave is a group of requests that are sent together."""

    spent: list[runs.Spent] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    @property
    def total_s(self) -> float:
        return sum(one.total_s for one in self.spent)

    @property
    def later_s(self) -> float:
        """Return the time without the first wave, which finds nothing. This wave has an eighth of these
        requests, but less than a hundredth of the report's thousand.
        """
        return sum(one.total_s for one in self.spent[1:])

    @property
    def found(self) -> float:
        """Return the tokens of prompts that were found, divided by all tokens. The token that is computed
        anyway counts as found.
        """
        whole = [one for one in self.requests if one.num_cached_tokens == one.num_prompt_tokens - 1]
        return sum(one.num_prompt_tokens for one in whole) / sum(len(one.token_ids) for one in self.requests)


def identical_prompts(bench: Bench, kept: Kept, *, repeats: int, say: Say) -> Figures:
    """Measure row 000-7: 64 prompts of 15 tokens. Either all of them are equal, or one in ten is the same
    prompt.
    """
    return _items(bench, kept, repeats=repeats, say=say, row="000-7", points=IDENTICAL)


def items_by_p(bench: Bench, kept: Kept, *, repeats: int, say: Say) -> Figures:
    """Measure the report's figure 2: the prompts of 000-7, for p from 0.1 to 1, with two answered tokens."""
    return _items(bench, kept, repeats=repeats, say=say, row="000-figure-2", points=CURVE)


def _items(
    bench: Bench, kept: Kept, *, repeats: int, say: Say, row: str, points: Sequence[tuple[float, int]]
) -> Figures:
    rows = []
    for p, answer in points:
        name = f"{row} p={p} answer={answer}"
        prompts = _mixed(bench, p)
        for _ in range(repeats):
            for cache, waves in _waves(bench, prompts, answer=answer).items():
                kept.add(f"{name} {cache}", len(prompts) / waves.total_s)
                kept.add(f"{name} later {cache}", (len(prompts) - WAVE) / waves.later_s)
                kept.add(f"{name} core {cache}", sum(one.core_s for one in waves.spent) / waves.total_s)
            say(
                f"{name}: {kept.series[f'{name} True'][-1] / kept.series[f'{name} False'][-1]:.3f} times as fast"
            )
        rows.append(
            {
                "p": p,
                "answer tokens": answer,
                "items/s with": kept.median(f"{name} True"),
                "items/s without": kept.median(f"{name} False"),
                **kept.ratios("ratio", f"{name} True", f"{name} False"),
                "after the first wave": kept.ratio(f"{name} later True", f"{name} later False"),
                "after the first wave, of the repeats": kept.spread(
                    f"{name} later True", f"{name} later False"
                ),
                "core's share of the time with": kept.median(f"{name} core True"),
                "core's share of the time without": kept.median(f"{name} core False"),
            }
        )
    return {"row": row, "goal": ">= 1.10 at p = 1, >= 0.95 at p = 0.1", "rows": rows}


def by_answer(bench: Bench, kept: Kept, *, repeats: int, say: Say) -> Figures:
    """Measure the 64 identical prompts of 15 tokens of 000-7, which were seen once before, by the number of
    answered tokens.
    """
    prompt = bench.text_of("same", SHORT_TOKENS)
    return gain_by_answer(bench, kept, prompt, ANSWERS, repeats=repeats, say=say, row="000-7-by-answer")


def question(bench: Bench, kept: Kept, *, repeats: int, say: Say) -> Figures:
    """Ask the question of 000-6, "What is your name?", 64 times after it was asked once. Answers are sampled
    at a temperature of 1, and so they differ.
    """
    drawn = SamplingParams(temperature=1.0)
    row = "000-6-by-answer"
    return gain_by_answer(
        bench, kept, bench.question, ANSWERS, repeats=repeats, say=say, row=row, sampling=drawn
    )


def gain_by_answer(
    bench: Bench,
    kept: Kept,
    prompt: Sequence[TokenId],
    answers: Sequence[int],
    *,
    repeats: int,
    say: Say,
    row: str,
    sampling: SamplingParams = GREEDY,
) -> Figures:
    names = {answer: f"{row} answer={answer}" for answer in answers}
    for answer, name in names.items():
        for _ in range(repeats):
            waves = _waves(bench, [prompt] * 64, answer=answer, sampling=sampling, seen=[prompt])
            for cache, one in waves.items():
                kept.add(f"{name} {cache}", 64 / one.total_s)
            kept.add(f"{name} found", waves[True].found)
            say(f"{name}: {waves[False].total_s / waves[True].total_s:.3f} times as fast")
    points = [(a, 1 / kept.median(f"{n} True"), 1 / kept.median(f"{n} False")) for a, n in names.items()]
    costs = answer_costs.fit(points)
    rows: list[Mapping[str, float | str]] = [
        {
            "answer tokens": answer,
            "items/s with": kept.median(f"{name} True"),
            "items/s without": kept.median(f"{name} False"),
            **kept.ratios("ratio", f"{name} True", f"{name} False"),
            "by the costs": costs.gain(answer),
            "found of all tokens": kept.median(f"{name} found"),
        }
        for answer, name in names.items()
    ]
    costs_text = (
        f"first token {1e3 * costs.first_with_s:.2f} ms with, {1e3 * costs.first_without_s:.2f} without, "
        f"each further {1e3 * costs.further_s:.2f}: {GOAL:.2f} up to {costs.longest_for(GOAL):.1f} tokens answered"
    )
    return {"row": row, "goal": f"by the costs of an item ({costs_text})", "rows": rows}


def _waves(
    bench: Bench,
    prompts: Sequence[Sequence[TokenId]],
    *,
    answer: int,
    sampling: SamplingParams = GREEDY,
    seen: Sequence[Sequence[TokenId]] = (),
) -> dict[bool, Waves]:
    """Return the waves by whether the cache is on. The prompts of `seen` are sent before the waves, and are
    not measured.
    """
    engines = {
        True: runs.engine_of(bench, cache=True, options=REPORT),
        False: runs.engine_of(bench.twin(), cache=False),
    }
    for engine in engines.values():
        runs.finish(bench, engine, [runs.request("seen", tokens, max_tokens=2) for tokens in seen])
    waves = {True: Waves(), False: Waves()}
    for at in range(0, len(prompts), WAVE):
        for cache in (True, False) if at // WAVE % 2 else (False, True):
            made = [
                runs.request(str(at + n), tokens, max_tokens=answer, sampling=replace(sampling, seed=at + n))
                for n, tokens in enumerate(prompts[at : at + WAVE])
            ]
            waves[cache].spent.append(runs.finish(bench, engines[cache], made))
            waves[cache].requests += made
    return waves


def _mixed(bench: Bench, p: float, *, count: int = 64) -> list[list[TokenId]]:
    """Return prompts. A share p of them is the same prompt, and each other prompt is new. All prompts begin
    with the same token, as with a BOS token.
    """
    same = bench.text_of("same", SHORT_TOKENS)
    own = SHORT_TOKENS - 1
    return [same if n % 10 < 10 * p else [same[0], *bench.text_of(f"own {n}", own)] for n in range(count)]
