"""Measures rows 000-5, 000-6 and 000-8: hit rates of the hash table report's experiment, with its bound K,
and of three policies.

Run with `python -m bench.model_server.bench_hit_rate`, which takes two minutes. The results are counts, not
times.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.model_server.report_workload import (
    NUM_REQUESTS,
    expected_rate,
    linear_fit,
    mixed_trace,
    prompts,
    run,
)
from bench.tables import show
from model_server.core.cache_options import CacheOptions
from model_server.core.eviction import EVICTION_NAMES

REPORT = CacheOptions(partial_blocks=True, eviction="last-touch", max_unused_blocks=2000)
ANSWER_TOKENS = (30, 90)
PLENTY = 20_000
FAMILY = (20, 80, 160, 320, 640, 2000)
REPORTED_RATE = 0.0814
REPORTED_PROMPTS = {
    "5, as GPT-2's and SmolLM2's tokenizers cut it": 5,
    "6, with a BOS token, as OPT's and Llama's": 6,
}
POOLS = (400, 600, 800, 1200, 1600, 2400)


@dataclass(frozen=True, slots=True)
class Curve:
    """The results of one bound K: for each p, the share of prompts found and the expected share."""

    bound: int
    points: list[tuple[float, float, float]]

    @property
    def line(self) -> tuple[float, float, float]:
        """Return slope, intercept and R squared."""
        return linear_fit([(p, rate) for p, rate, _ in self.points])


def family(
    *,
    bounds: Sequence[int] = FAMILY,
    tenths: Sequence[int] = range(1, 11),
    answer_tokens: tuple[int, int] = ANSWER_TOKENS,
) -> list[Curve]:
    """Measure row 000-5 at several K."""
    curves = []
    for bound in bounds:
        options = replace(REPORT, max_unused_blocks=bound)
        points = []
        for tenth in tenths:
            p = tenth / 10
            found = run(
                prompts(p, seed=tenth), num_blocks=PLENTY, options=options, answer_tokens=answer_tokens
            )
            expected = expected_rate(p, bound=bound, answer_tokens=answer_tokens)
            points.append((p, found.prompt_rate, expected))
        curves.append(Curve(bound, points))
    return curves


def answers_for_the_reported_rate(prompt_tokens: int) -> tuple[float, float]:
    """Return the mean number of answer tokens with which 8.14 % of all tokens belong to a prompt that was
    seen before, and the rate measured with this number.

    A prompt is found 999 of 1,000 times: rate = 0.999 n / (n + answer).
    """
    answer = prompt_tokens * ((NUM_REQUESTS - 1) / NUM_REQUESTS / REPORTED_RATE - 1)
    longest = round(2 * answer) - 1
    rates = identical_prompts(prompt_tokens=prompt_tokens, answer_tokens=(1, longest))
    return answer, rates["prompt tokens found, of all tokens"]


def identical_prompts(
    *, prompt_tokens: int = 6, answer_tokens: tuple[int, int] = (64, 64)
) -> dict[str, float]:
    """Measure row 000-6: "What is your name?" is asked 1,000 times."""
    found = run(
        ([100 + i for i in range(prompt_tokens)] for _ in range(NUM_REQUESTS)),
        num_blocks=PLENTY,
        options=REPORT,
        answer_tokens=answer_tokens,
    )
    total = prompt_tokens + sum(answer_tokens) / 2
    return {
        "prompts found": found.prompt_rate,
        "prompt tokens found, of all tokens": found.whole_sequence_rate,
        "expected share of found tokens": (NUM_REQUESTS - 1) / NUM_REQUESTS * prompt_tokens / total,
    }


def policies_on_one_trace(
    *, num_requests: int = 2000, pools: tuple[int, ...] = POOLS, drift_every: int | None = None
) -> list[list[float]]:
    """Return, for each number of blocks, the prefill tokens that each policy saves, as a share of all."""
    rows = []
    for num_blocks in pools:
        row: list[float] = [num_blocks]
        for name in EVICTION_NAMES:
            found = run(
                mixed_trace(seed=4, num_requests=num_requests, drift_every=drift_every),
                num_blocks=num_blocks,
                options=CacheOptions(eviction=name),
                answer_tokens=(5, 30),
                concurrency=8,
            )
            row.append(found.token_rate)
        rows.append(row)
    return rows


def main() -> None:
    identical = identical_prompts()
    show(
        "000-6: one prompt of 6 tokens, sent 1,000 times, 64 answered tokens",
        ("rate", "value"),
        list(identical.items()),
    )
    reported = [(name, *answers_for_the_reported_rate(tokens)) for name, tokens in REPORTED_PROMPTS.items()]
    show(
        "000-6: lengths of answers that give the report's 8.14 %",
        ("prompt tokens", "mean answer tokens", "measured rate"),
        reported,
    )

    curves = family()
    slope, intercept, _ = curves[-1].line
    show(
        f"000-5: prompts found by K, and the expected share; the last is {slope:.3f} p {intercept:+.3f}",
        ("K", *(f"p={p}" for p, _, _ in curves[0].points), "R squared"),
        [[c.bound, *(f"{r:.3f} ({e:.3f})" for _, r, e in c.points), c.line[2]] for c in curves],
    )

    policies = policies_on_one_trace()
    show("000-8: prefill tokens saved on one trace", ("blocks", *EVICTION_NAMES), policies)
    drifting = policies_on_one_trace(drift_every=100)
    show(
        "000-8: prefill tokens saved if the favourites change every 100 requests",
        ("blocks", *EVICTION_NAMES),
        drifting,
    )


if __name__ == "__main__":
    main()
