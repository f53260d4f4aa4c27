"""Decides which adapters to load and unload, from the wanted adapters, the served adapters, and the history.

The rules:
- a wanted adapter that is not served is loaded. A wanted adapter that is served from another path is unloaded
  first;
- this process unloads only what it has loaded itself, unless it prunes: adapters that the server got at its
  start or from another program stay;
- a failed action is tried again after a pause. The pause doubles with each failure. A part of it is random,
  so that the sidecars of a fleet do not ask a shared store at the same moment. A changed path starts again
  with the first pause.

A server that restarts has lost the loaded adapters. If an adapter that this process loaded is no longer
served, this process forgets that it has loaded the adapter, and loads it again if it is wanted.

Time and randomness are arguments. Caller: `loop`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NewType

AdapterName = NewType("AdapterName", str)
Adapters = Mapping[AdapterName, str]
"""The path of each adapter, by name."""
State = Literal["loaded", "pending", "failed", "conflict", "leaving", "foreign"]


@dataclass(frozen=True, slots=True)
class Load:
    name: AdapterName
    path: str


@dataclass(frozen=True, slots=True)
class Unload:
    name: AdapterName
    path: str
    """The path from which the adapter is served."""


Action = Load | Unload


@dataclass(frozen=True, slots=True)
class Record:
    """The history of one adapter: the path from which this process loaded it, and its last failed action."""

    loaded_path: str | None = None
    """The path from which this process loaded the adapter. None again if the adapter is no longer served from
    this path.
    """
    failed: Action | None = None
    failures: int = 0
    """How often the action `failed` has failed in a row."""
    retry_at_s: float = 0.0
    error: str = ""


History = Mapping[AdapterName, Record]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    first_s: float = 1.0
    most_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.most_s:
            raise ValueError("first_s must be above 0, and most_s must not be less than first_s")

    def delay_s(self, failures: int, rng: random.Random) -> float:
        """Return the pause after this many failures: half of the doubled time, plus a random part of the
        other half.
        """
        longest = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 60))
        return longest * (0.5 + 0.5 * rng.random())


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    name: AdapterName
    path: str
    """The wanted path, or for an adapter that is not wanted, the path from which it is served."""
    state: State
    failures: int = 0
    error: str = ""
    retry_in_s: float | None = None


def plan(wanted: Adapters, served: Adapters, history: History, *, now: float, prune: bool) -> list[Action]:
    """Return the actions to do now, at most one for each name. The actions that free room come first. Plan
    again after these actions.
    """
    unloads: list[Action] = []
    loads: list[Action] = []
    for name, path in served.items():
        if wanted.get(name) != path and _removable(history.get(name), path, prune=prune):
            unloads.append(Unload(name, path))
    for name, path in wanted.items():
        if name not in served:
            loads.append(Load(name, path))
    return [action for action in (*unloads, *loads) if _due(history.get(action.name), action, now=now)]


def observed(history: History, *, wanted: Adapters, served: Adapters) -> dict[AdapterName, Record]:
    """Return the history after the server was asked. Names that neither side knows are forgotten."""
    kept: dict[AdapterName, Record] = {}
    for name, record in history.items():
        if name not in wanted and name not in served:
            continue
        gone = record.loaded_path is not None and served.get(name) != record.loaded_path
        kept[name] = replace(record, loaded_path=None) if gone else record
    return kept


def succeeded(action: Action) -> Record:
    return Record(loaded_path=action.path) if isinstance(action, Load) else Record()


def failed(
    record: Record | None, action: Action, *, error: str, now: float, backoff: Backoff, rng: random.Random
) -> Record:
    before = record or Record()
    failures = before.failures + 1 if before.failed == action else 1
    return replace(
        before,
        failed=action,
        failures=failures,
        retry_at_s=now + backoff.delay_s(failures, rng),
        error=error,
    )


def next_retry_s(history: History, *, now: float) -> float | None:
    """Return the time when the first failed action is due again. None means that no action waits."""
    due = [record.retry_at_s for record in history.values() if record.failures and record.retry_at_s > now]
    return min(due, default=None)


def status(
    wanted: Adapters, served: Adapters, history: History, *, now: float, prune: bool
) -> list[AdapterStatus]:
    """Return the status of each adapter that is wanted or served, the wanted adapters first."""
    found: list[AdapterStatus] = []
    for name, path in wanted.items():
        action: Action = Load(name, path)
        state: State = "pending"
        if name in served:
            action = Unload(name, served[name])
            removable = _removable(history.get(name), served[name], prune=prune)
            state = "loaded" if served[name] == path else "pending" if removable else "conflict"
        found.append(_line(name, path, state, history.get(name), action, now=now))
    for name, path in served.items():
        if name not in wanted:
            removable = _removable(history.get(name), path, prune=prune)
            state = "leaving" if removable else "foreign"
            found.append(_line(name, path, state, history.get(name), Unload(name, path), now=now))
    return found


def in_sync(lines: list[AdapterStatus]) -> bool:
    return all(line.state in ("loaded", "foreign") for line in lines)


def _line(
    name: AdapterName, path: str, state: State, record: Record | None, action: Action, *, now: float
) -> AdapterStatus:
    if state == "conflict":
        return AdapterStatus(
            name, path, state, error=f"served from {action.path}, which this process did not load"
        )
    if state in ("loaded", "foreign") or record is None or record.failed != action:
        return AdapterStatus(name, path, state)
    waits_s = max(0.0, record.retry_at_s - now)
    return AdapterStatus(name, path, "failed", record.failures, record.error, waits_s)


def _removable(record: Record | None, path: str, *, prune: bool) -> bool:
    return prune or (record is not None and record.loaded_path == path)


def _due(record: Record | None, action: Action, *, now: float) -> bool:
    return record is None or record.failed != action or now >= record.retry_at_s
