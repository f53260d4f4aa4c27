"""Measures row 000-7 on an engine: items a second with partial blocks cached, divided by those without.

Requests come in waves of 8, since requests of one step cannot find what the same step computes. The sides
take turns at each wave, not at each run: the expected difference is a few per cent, and a busy machine
changes by more than that within a run. The command calls this module.
"""

from collections.abc import Sequence

from bench.model_server.engine import runs
from bench.model_server.engine.runs import Bench, Figures, Kept, Say
from model_server.core.cache_options import CacheOptions
from model_server.core.request import TokenId

SHORT_TOKENS, WAVE = 15, 8
"""The tokens of the report's prompts, and the requests of a wave. The report does not state the lengths of
its answers.
"""
REPORT = CacheOptions(partial_blocks=True, eviction="last-touch", max_unused_blocks=64)
"""The report's cache: partial blocks, at most K unused blocks, and eviction by last touch. 64 requests
leave more than K blocks behind.
"""
POINTS = ((1.0, 2), (1.0, 16), (0.1, 16))
"""The points (p, answered tokens) of row 000-7."""


def identical_prompts(bench: Bench, kept: Kept, *, repeats: int, say: Say) -> Figures:
    """Measure row 000-7: 64 prompts of 15 tokens. Either all of them are equal, or one in ten is the same
    prompt.
    """
    rows = []
    for p, answer in POINTS:
        name = f"000-7 p={p} answer={answer}"
        prompts = _mixed(bench, p)
        for _ in range(repeats):
            for cache, waves_s in _waves(bench, prompts, answer=answer).items():
                kept.add(f"{name} {cache}", len(prompts) / sum(waves_s))
                # The first wave finds nothing. It has an eighth of these requests, but less than a hundredth
                # of the report's thousand.
                kept.add(f"{name} later {cache}", (len(prompts) - WAVE) / sum(waves_s[1:]))
            say(
                f"{name}: {kept.series[f'{name} True'][-1] / kept.series[f'{name} False'][-1]:.3f} times as fast"
            )
        rows.append(
            {
                "p": p,
                "answer tokens": answer,
                "items/s with": kept.median(f"{name} True"),
                "items/s without": kept.median(f"{name} False"),
                **kept.ratios("after the first wave", f"{name} later True", f"{name} later False"),
                **kept.ratios("ratio", f"{name} True", f"{name} False"),
            }
        )
    return {"row": "000-7", "goal": ">= 1.10 at p = 1, >= 0.95 at p = 0.1", "rows": rows}


def _waves(bench: Bench, prompts: Sequence[Sequence[TokenId]], *, answer: int) -> dict[bool, list[float]]:
    """Return the seconds of each wave by whether the cache is on."""
    engines = {
        True: runs.engine_of(bench, cache=True, options=REPORT),
        False: runs.engine_of(bench.twin(), cache=False),
    }
    waves: dict[bool, list[float]] = {True: [], False: []}
    for at in range(0, len(prompts), WAVE):
        for cache in (True, False) if at // WAVE % 2 else (False, True):
            made = [
                runs.request(str(at + n), tokens, max_tokens=answer)
                for n, tokens in enumerate(prompts[at : at + WAVE])
            ]
            waves[cache].append(runs.finish(bench, engines[cache], made))
    return waves


def _mixed(bench: Bench, p: float, *, count: int = 64) -> list[list[TokenId]]:
    """Return prompts. A share p of them is the same prompt, and each other prompt is new. All prompts begin
    with the same token, as with a BOS token.
    """
    same = bench.text_of("same", SHORT_TOKENS)
    own = SHORT_TOKENS - 1
    return [same if n % 10 < 10 * p else [same[0], *bench.text_of(f"own {n}", own)] for n in range(count)]
