"""Decides which runs a serving bench makes, and in which order. The command calls this module."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

IN_TURNS, AT_ONCE = "in turns", "at once"


def in_turns(args: argparse.Namespace, engine: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the runs of each start of a server. The order changes from one repeat to the next: on, off; off,
    on.

    So the same side often runs twice in a row, and then one start of the server is enough for both repeats.
    """
    wanted = [
        _about(args, engine, cache=cache, rate=rate, seed=seed)
        for seed in range(args.seed, args.seed + args.repeats)
        for cache in sorted((name == "on" for name in args.caches), reverse=seed % 2 == 1)
        for rate in args.rates
    ]
    for _, group in groupby(wanted, key=itemgetter("cache")):
        yield list(group)


def at_once(args: argparse.Namespace, engine: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the runs of each start of all servers. Neighbouring runs have the same requests. Each repeat has
    its own start, and the order turns around from one repeat to the next. The reason is that one of two
    processes with the same work can be slower by a tenth for as long as both run.
    """
    for seed in range(args.seed, args.seed + args.repeats):
        sides = sorted((name == "on" for name in args.caches), reverse=seed % 2 == 1)
        yield [
            _about(args, engine, cache=cache, rate=rate, seed=seed) | {"sides": AT_ONCE}
            for rate in args.rates
            for cache in sides
        ]


def made(run: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether a run in a file is the wanted run. Older files do not state `sides`."""
    return wanted.items() <= ({"sides": IN_TURNS} | dict(run)).items()


def _about(args: argparse.Namespace, engine: str, *, cache: bool, rate: float, seed: int) -> dict[str, Any]:
    """Return the parts that identify a run."""
    return {
        "sides": IN_TURNS,
        "engine": engine,
        "cache": cache,
        "rate": rate,
        "seed": seed,
        "layers": args.layers or 30,
        "requests": args.requests,
        "shared": args.shared_tokens,
        "own": args.own_tokens,
        "answered": args.answer_tokens,
        "clock": args.clock,
    }
