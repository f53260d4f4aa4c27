"""`epp replay`: reads a recording, runs it with every policy, prints the table. The command line calls it."""

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Final

import msgspec

from epp.base.errors import ConfigError, usable
from epp.config.policy import DEFAULT_POLICY, Policy, RuleName, load_policy
from epp.tools.replay.reading import read
from epp.tools.replay.simulate import Figures, Trace, run

RECORDED: Final = "as recorded"
_MOST_SERVERS: Final = 12
"""With more servers, the table has only sums of them."""
_ROWS: Final[Sequence[tuple[str, Callable[[Figures], str]]]] = (
    ("token hit rate", lambda f: f"{f.hit_ratio:.1%}"),
    ("TTFT mean", lambda f: _ms(f.ttft_mean_s)),
    ("TTFT p50", lambda f: _ms(f.ttft_p50_s)),
    ("TTFT p90", lambda f: _ms(f.ttft_p90_s)),
    ("TTFT p99", lambda f: _ms(f.ttft_p99_s)),
    ("TPOT p50", lambda f: _ms(f.tpot_p50_s, digits=1)),
    ("TPOT p90", lambda f: _ms(f.tpot_p90_s, digits=1)),
    ("requests counted", lambda f: f"{f.counted:,}"),
    ("failed or unfinished", lambda f: f"{f.failed:,}"),
    ("busiest / mean server", lambda f: f"{imbalance(f):.2f}"),
)


def replay(
    recordings: Sequence[Path],
    *,
    policies: Sequence[Path],
    rules: Sequence[RuleName],
    load: float,
    servers: int,
    json_file: Path | None,
) -> None:
    """Print what each policy would have done. A ConfigError names the file or option that cannot be used."""
    began = time.monotonic()
    with usable():
        trace = read(recordings).changed(load=load, servers=servers)
        candidates = _candidates(trace, policies, rules)
        print(_about(trace, load=load), flush=True)
        for remark in _remarks(trace, candidates.values()):
            print(f"note: {remark}", flush=True)
        columns = {RECORDED: trace.recorded} if trace.recorded is not None else {}
        columns |= _run_all(trace, candidates)
        print(f"\n{table(columns)}\n")
        if json_file is not None:
            json_file.write_bytes(msgspec.json.format(msgspec.json.encode(columns), indent=2) + b"\n")
        print(f"{time.monotonic() - began:.1f} s", flush=True)


def _run_all(trace: Trace, candidates: Mapping[str, Policy]) -> dict[str, Figures]:
    """Return the figures by name. Each run has a process of its own, as many at once as there are cores."""
    with ProcessPoolExecutor() as pool:
        runs = {name: pool.submit(run, trace, policy) for name, policy in candidates.items()}
        for done, _ in enumerate(as_completed(runs.values()), start=1):
            print(f"{done} of {len(runs)} policies have run", file=sys.stderr, flush=True)
        try:
            return {name: each.result() for name, each in runs.items()}
        except BrokenProcessPool as error:
            raise ConfigError(
                "a run was killed; perhaps the memory is too small: replay the first lines of the file"
            ) from error


def _candidates(trace: Trace, policies: Sequence[Path], rules: Sequence[RuleName]) -> dict[str, Policy]:
    """Return by name the recorded policy first, then the policies of files, then one for each rule."""
    base = trace.policy or DEFAULT_POLICY
    tried = [load_policy(path.read_bytes(), source=str(path)) for path in policies]
    found = {_named("recorded" if trace.policy is not None else "default", base): base}
    found |= {_named(path.stem, policy): policy for path, policy in zip(policies, tried, strict=True)}
    spec = base.spec
    found |= {
        rule: msgspec.structs.replace(base, spec=msgspec.structs.replace(spec, rule=rule)) for rule in rules
    }
    if len(found) < 1 + len(policies) + len(rules):
        raise ConfigError(f"two policies have the same name: {', '.join(found)}; rename one of the files")
    return found


def _named(name: str, policy: Policy) -> str:
    return f"{name} ({policy.spec.rule})"


def _about(trace: Trace, *, load: float) -> str:
    calls, servers = trace.calls, trace.servers
    tokens = sum(request.num_prompt_tokens for _, request in calls)
    minutes = calls[-1][0] * load / 60
    return (
        f"{len(calls):,} requests of {minutes:.1f} minutes, {tokens / len(calls):,.0f} prompt tokens each on average, at {load:g} times "
        f"the recorded rate\n{len(servers)} simulated servers, {servers[0].capacity_tokens:,} tokens of cache and "
        f"{servers[0].prefill_tokens_per_s:,.0f} tokens of prefill a second each"
    )


def _remarks(trace: Trace, policies: Collection[Policy]) -> list[str]:
    found = [*trace.remarks]
    if any(policy.spec.flow.mode != "Direct" for policy in policies):
        found.append("flow control is not simulated: every request is sent at once")
    if any(policy.spec.rule == "session" for policy in policies):
        found.append("sessions are not recorded: the rule `session` sees requests without a session")
    if trace.recorded is not None:
        found.append(
            "'as recorded': hits are those that the picker predicted, times are those of sampled answers only"
        )
    return found


# -- the table -----------------------------------------------------------------------------------------------


def table(columns: Mapping[str, Figures]) -> str:
    """Return one column for each policy, one row for each figure. A small number of servers have their own
    rows.
    """
    rows = [["", *columns]]
    rows += [[label, *(show(figures) for figures in columns.values())] for label, show in _ROWS]
    servers = list(dict.fromkeys(server for figures in columns.values() for server in figures.by_server))
    if len(servers) <= _MOST_SERVERS:
        rows += [
            [f"requests to {server}", *(f"{f.by_server.get(server, 0):,}" for f in columns.values())]
            for server in servers
        ]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def imbalance(figures: Figures) -> float:
    """Return the requests of the busiest server divided by the mean."""
    counts = list(figures.by_server.values())
    return max(counts) * len(counts) / sum(counts) if counts and sum(counts) else 0.0


def _ms(seconds: float | None, *, digits: int = 0) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.{digits}f} ms"
