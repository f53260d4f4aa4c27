"""Corrects the prefix table by the servers' reports about their own caches. Only exact mode makes them,
so the state of exact mode as people and Prometheus see it is defined here too.

`server_caches` calls this module. `kvevents` makes the states. All code here is synchronous.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, Literal

from epp.base.metric import counter, gauge
from epp.base.types import ChunkHash, EndpointName
from epp.picker.prefix_index.table import PrefixTable, Use
from epp.picker.prefix_index.upkeep import forget

UNDER_WAY_S: Final = 60.0
"""A server may still be about to store a prompt that it got less than this time ago, so a missing prompt
proves nothing yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReport:
    """By its own events, a server lost the last chunk of a chain.

    The server lacks this chunk, unless the chunk was used after `at`.
    """

    server: EndpointName
    chain: Sequence[ChunkHash]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupReport:
    """How much of one chain each server holds. Made when a prompt was routed and its blocks were looked up at
    every server.
    """

    chain: Sequence[ChunkHash]
    """No longer than what some server holds. Further names of blocks that we computed may be wrong."""
    held: Mapping[EndpointName, int]
    """Number of chunks that each server holds, for servers that hold any."""
    sure: AbstractSet[EndpointName]
    """Servers that hold no more than `held` says, except for prompts that they got in the
    last `UNDER_WAY_S`."""
    from_chunk: int
    """The report says nothing about prefixes of fewer chunks: such prefixes hold no whole block."""
    at: float


KvReport = LossReport | LookupReport


def correct(table: PrefixTable, findings: Iterable[KvReport], counts: dict[str, int]) -> None:
    """Correct the table by the servers' own events. Add to `counts` the chains that were added because
    servers hold them (credited), and the entries that were removed because servers do not (forgotten).
    """
    for finding in findings:
        match finding:
            case LossReport(server=name, chain=chain, at=at):
                counts["forgotten"] += forget(table, name, chain, keep=len(chain) - 1, as_of=at)
            case LookupReport():
                _check(table, finding, counts)


def _check(table: PrefixTable, checked: LookupReport, counts: dict[str, int]) -> None:
    chain, believed, as_of = checked.chain, table.match(checked.chain), checked.at - UNDER_WAY_S
    for name, held in checked.held.items():
        if held > believed.get(name, 0):
            counts["credited"] += credit(table, name, chain[:held], now=checked.at)
    for name, chunks in believed.items():
        held = max(checked.held.get(name, 0), checked.from_chunk)
        if name in checked.sure and held < chunks:
            counts["forgotten"] += forget(table, name, chain, keep=held, as_of=as_of)


def credit(table: PrefixTable, name: EndpointName, chain: Sequence[ChunkHash], *, now: float) -> bool:
    """Record that the server already holds the chain. The chunks that were not known count as its least
    recently used ones.

    True: there were such chunks, and there was room for them. Prompts sent there since then will evict them.
    A server that has left is ignored.
    """
    mirror = table.taking(name)
    if mirror is None or not chain:
        return False
    _, covered = table.path_of(mirror, chain)
    missing_bytes = table.size_bytes(covered, len(chain))
    if not missing_bytes or mirror.used_bytes + missing_bytes > mirror.capacity_bytes:
        return False
    runs = table.whole_path(chain)
    missing = [run for run in runs if run not in mirror.last_use]
    if not missing:
        return False
    oldest = mirror.oldest
    use = Use(table.advance(now) if oldest is None else oldest.at, missing[-1])
    mirror.uses[use] = None
    mirror.uses.move_to_end(use, last=False)
    for run in missing:
        table.hold(mirror, run)
        mirror.last_use[run] = use
    table.mend(runs)
    return True


ModelState = Literal["waiting", "checking", "on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactModelStatus:
    """The state of exact mode for the prompts of one base model."""

    state: ModelState = gauge(
        "epp_exact_model",
        "Always 1. The label gives the state of exact mode for a base model: waiting (for the first "
        "event), checking (whether routed prompts appear in the events), on or off. After an unexpected "
        "error exact mode is off for every model until it starts again; the log has the error.",
        "state",
    )
    reason: str
    prompts: Mapping[str, int] = counter(
        "epp_exact_prompts_total",
        "Routed prompts, by what exact mode did with them. mapped: the prompt was mapped to blocks. "
        "matched or missed: its blocks did or did not appear on the server. Any other value says why the "
        "prompt was not mapped: adapter, arguments, content, error, template, waiting, model, "
        "off.",
        "result",
    )
    algorithm: str = ""
    """How the servers name blocks. Empty: this is not known yet."""
    block_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactServerStatus:
    """What exact mode knows of one server."""

    state: str = gauge(
        "epp_exact_endpoint",
        "Always 1. The label says what the picker knows of the cache of the endpoint: following "
        "(everything), partly (what was stored since the picker connected) or off.",
        "state",
    )
    reason: str
    blocks: int = gauge("epp_exact_endpoint_blocks", "Blocks that the endpoint holds, by its KV events.")
    events: int = counter("epp_exact_endpoint_events_total", "KV events received from the endpoint.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactStatus:
    """What the KV events of the servers say. All but blocks are totals since the picker
    started.
    """

    models: Mapping[str, ExactModelStatus]
    servers: Mapping[EndpointName, ExactServerStatus]
    gaps: Mapping[str, int] = counter(
        "epp_exact_gaps_total",
        "How often messages of a server were missing. found: all gaps. lost: gaps that the replay did not "
        "fill.",
        "kind",
    )
    malformed: int = counter("epp_exact_malformed_total", "Messages that could not be read as KV events.")
    dropped_prompts: int = counter(
        "epp_exact_dropped_prompts_total",
        "Routed prompts that exact mode skipped because too many were waiting.",
    )
    corrections: Mapping[str, int] = counter(
        "epp_exact_corrections_total",
        "Corrections of the prefix table by KV events. credited: chains added for a server that holds "
        "them. forgotten: entries removed for a server that does not hold them.",
        "kind",
    )
