"""Does several runs at once, each in a process of its own, and shows their progress. If one run fails, the
replay fails.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from epp.config.policy import Policy
from epp.tools.replay.simulate import Setting, run
from epp.tools.replay.trace import Figures, ReplayError, Trace

OnProgress = Callable[[dict[str, float]], None]
"""A function that gets the finished share of each run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A policy and its name in the table."""

    name: str
    policy: Policy


def run_all(
    trace: Trace,
    candidates: Sequence[Candidate],
    setting: Setting,
    *,
    processes: int,
    on_progress: OnProgress,
) -> dict[str, Figures]:
    """Return the results by name, in the given order."""
    shares = dict.fromkeys((candidate.name for candidate in candidates), 0.0)
    found: dict[str, Figures] = {}
    waiting, running = deque(candidates), dict[Connection, str]()
    started: list[Any] = []
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                candidate = waiting.popleft()
                ours, theirs = multiprocessing.Pipe(duplex=False)
                process = multiprocessing.Process(
                    target=_run, args=(trace, candidate.policy, setting, theirs), daemon=True
                )
                process.start()
                theirs.close()
                started.append(process)
                running[ours] = candidate.name
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                name = running[connection]
                try:
                    message: float | Figures = connection.recv()
                except EOFError as error:
                    raise ReplayError(f"the run of {name} failed; its error is printed above") from error
                if isinstance(message, float):
                    shares[name] = message
                else:
                    found[name], shares[name] = message, 1.0
                    del running[connection]
                on_progress(shares)
    finally:
        for process in started:
            process.terminate()
            process.join()
    return {candidate.name: found[candidate.name] for candidate in candidates}


def _run(trace: Trace, policy: Policy, setting: Setting, connection: Connection) -> None:
    connection.send(run(trace, policy, setting, progress=connection.send))
