"""Reports the results of the runs in front of real vLLM servers: a table of the rules, the simulator's order,
and the picker's beliefs compared with the true values. Pure.
"""

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

import msgspec

from bench.routing.live.vllm_fleet import Speed
from bench.routing.rows import Row, mean_row, spread
from bench.tables import markdown

APART = 0.15
"""Rules whose simulated means differ by less than this share count as equal."""


class Believed(msgspec.Struct, frozen=True):
    """The picker's beliefs about one server at the end of a run."""

    prefill_tokens_per_s: float
    table_tokens: float
    """The size of the mirror of the server's cache."""
    bytes_per_token: float


class VllmRun(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one rule with one seed."""

    rule: str
    seed: int
    seconds: float
    serial: bool = False
    live: Row
    simulated: Row
    requests_per_s: float
    prompt_tokens_per_s: float
    counted_hit_share: float
    """Share of prompt tokens found in caches, by the servers' own counters."""
    speed: Speed
    true_prefill_tokens_per_s: list[float | None]
    true_cache_tokens: int
    true_bytes_per_token: float
    believed: list[Believed]
    sent_late_p99_s: float
    failures: list[str]


def report(runs: Sequence[VllmRun]) -> str:
    if not runs:
        return "no results yet"
    by_rule = {
        rule: [run for run in runs if run.rule == rule] for rule in dict.fromkeys(r.rule for r in runs)
    }
    common = set.intersection(*({run.seed for run in of} for of in by_rule.values()))
    fair = {rule: [run for run in of if run.seed in common] for rule, of in by_rule.items()}
    compared = [rules(fair), order(fair)] if common else []
    return "\n\n".join([*compared, beliefs(runs), machine(runs)])


def rules(by_rule: dict[str, list[VllmRun]]) -> str:
    """Return one line for each rule, the best mean first. Means are over the seeds that all rules have
    run.
    """
    lines = [
        (
            "| rule | seeds | TTFT mean s (spread) | TTFT mean in prompt tokens | simulated mean s | p50 | p90 | p99 | TPOT p90 ms | hits, counted by the servers "
            "| simulated hits | requests/s | prompt tokens/s |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for rule in sorted(by_rule, key=lambda name: _mean_ttft(by_rule[name])):
        runs = by_rule[rule]
        live, sim = mean_row([r.live for r in runs]), mean_row([r.simulated for r in runs])
        lines.append(
            f"| {rule} | {len(runs)} | {live.ttft_mean_s:.3f} ({spread([r.live for r in runs], 'ttft_mean_s'):.3f}) "
            f"| {fmean(map(ttft_in_prompt_tokens, runs)):.0f} | {sim.ttft_mean_s:.3f} | {live.ttft_p50_s:.3f} | {live.ttft_p90_s:.3f} | {live.ttft_p99_s:.3f} "
            f"| {1000 * live.tpot_p90_s:.0f} | {fmean(r.counted_hit_share for r in runs):.3f} | {sim.hit_ratio:.3f} "
            f"| {fmean(r.requests_per_s for r in runs):.2f} | {fmean(r.prompt_tokens_per_s for r in runs):.0f} |"
        )
    return "\n".join(lines)


def ttft_in_prompt_tokens(run: VllmRun) -> float:
    """Return the mean TTFT in prompt tokens: how many tokens a server computed in that time, by its own
    counters in the same run.

    On a machine with other work, servers are several times as fast in one run as in the next. So seconds
    would compare the states of the machine, and prompt tokens compare the rules.
    """
    return run.live.ttft_mean_s * fmean(_rates(run))


def order(by_rule: dict[str, list[VllmRun]]) -> str:
    """Return the pairs of rules that the simulator puts in another order than the live runs."""
    apart, wrong = 0, []
    for one, other in combinations(by_rule, 2):
        sims = [fmean(r.simulated.ttft_mean_s for r in by_rule[name]) for name in (one, other)]
        lives = [_mean_ttft(by_rule[name]) for name in (one, other)]
        tokens = [fmean(map(ttft_in_prompt_tokens, by_rule[name])) for name in (one, other)]
        if abs(sims[0] - sims[1]) <= APART * min(sims):
            continue
        apart += 1
        if (sims[0] < sims[1]) != (lives[0] < lives[1]):
            wrong.append(
                f"{one} and {other}: simulated {sims[0]:.3f} and {sims[1]:.3f} s, live {lives[0]:.3f} and {lives[1]:.3f} s, "
                f"or {tokens[0]:.0f} and {tokens[1]:.0f} prompt tokens"
            )
    heading = f"Pairs of rules that the simulator puts over {APART:.0%} apart by mean TTFT: {apart}; in another order live: {len(wrong)}"
    return "\n".join([heading, *(f"- {line}" for line in wrong)])


def beliefs(runs: Sequence[VllmRun]) -> str:
    """Return means over servers and runs. Brackets have the least and the most."""
    pairs = [
        ("prefill rate, tokens/s", [rate for r in runs for rate in _rates(r)], "prefill_tokens_per_s"),
        ("cache, tokens", [float(r.true_cache_tokens) for r in runs], "table_tokens"),
        ("bytes of prompt for each token", [r.true_bytes_per_token for r in runs], "bytes_per_token"),
    ]
    rows = [
        (label, _span(true), _span([getattr(one, name) for run in runs for one in run.believed]))
        for label, true, name in pairs
    ]
    return markdown(("value of a server", "true", "learned by the end of a run"), rows)


def machine(runs: Sequence[VllmRun]) -> str:
    alone = [r.speed.alone_tokens_per_s for r in runs]
    together = [r.speed.together_tokens_per_s for r in runs]
    late = 1000 * max(r.sent_late_p99_s for r in runs)
    failed = sum(len(r.failures) for r in runs)
    return "\n".join(
        [
            f"- {len(runs)} runs; failed requests: {failed}; delay of sending, p99 of the worst run: {late:.0f} ms",
            (
                f"- a new prompt: {_span(alone)} tokens/s while the other servers rest, {_span(together)} while all compute; "
                f"a decode step then {1000 * fmean(r.speed.step_s for r in runs):.0f} ms"
            ),
        ]
    )


def _mean_ttft(runs: Sequence[VllmRun]) -> float:
    return fmean(run.live.ttft_mean_s for run in runs)


def _rates(run: VllmRun) -> list[float]:
    return [rate for rate in run.true_prefill_tokens_per_s if rate is not None]


def _span(values: Sequence[float]) -> str:
    if not values:
        return "-"
    digits = 0 if max(values) >= 100 else 2
    return f"{fmean(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"
