"""An admin address with a made-up picker: any number of endpoints, requests of every outcome, an account of
misses.
"""

import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from epp.base.types import Address, EndpointName
from epp.config.policy import DEFAULT_POLICY
from epp.observe.misses import CAUSES
from epp.observe.telemetry.admin import AdminServer
from epp.observe.telemetry.board import Board
from epp.observe.telemetry.decisions import DecisionRing, RefusalRecord
from epp.observe.telemetry.metrics import Metrics
from epp.observe.telemetry.picker_state import EndpointStatus, PickerStatus
from epp.picker.decision import Decision, WouldPick
from epp.picker.flow.accounts import FlowStatus, WaitingTenant
from tests.unit.observe.telemetry.records import decision


def a_board(
    ring: DecisionRing,
    state: Callable[[], PickerStatus],
    *,
    explain: Callable[[float], dict[str, Any]] = lambda window_s: {
        "requests": 0,
        "causes": [],
        "window_s": window_s,
    },
    dry_run: Callable[[], dict[str, Any] | None] = lambda: None,
) -> Board:
    return Board(state=state, decisions=ring, explain=explain, dry_run=dry_run)


def an_admin(
    ring: DecisionRing | None = None, state: Callable[[], PickerStatus] = PickerStatus, **changes: Any
) -> AdminServer:
    """Return a server of the admin pages on any free port. `changes` are its other arguments."""
    ring = DecisionRing(maxlen=10) if ring is None else ring
    usual: dict[str, Any] = {
        "address": Address("127.0.0.1", 0),
        "metrics": Metrics(decisions=ring, state=state),
        "board": a_board(ring, state),
        "not_ready": str,
        "recording": lambda _: (b"", 0, 1),
        "hosts": (),
        "policy": lambda: DEFAULT_POLICY,
    }
    return AdminServer(**{**usual, **changes})


@dataclass
class Scene:
    """Returns the content of the page. `turn` moves the endpoints' numbers."""

    count: int
    ring: DecisionRing
    status: PickerStatus
    board: Board
    url: str = ""

    def turn(self, n: int) -> None:
        rng = random.Random(n)
        self.status = replace(self.status, endpoints=tuple(_endpoint(k, n, rng) for k in range(self.count)))


def _endpoint(k: int, n: int, rng: random.Random) -> EndpointStatus:
    asked = 40_000.0 * (n + 1)
    out = k == 2
    return EndpointStatus(
        name=EndpointName(f"vllm-{k}"),
        address="10.0.0.1:8000",
        ready=not out,
        ejected="half of its recent answers failed" if out else "",
        in_flight=0 if out else rng.randrange(2, 14),
        waiting=rng.randrange(3),
        running=8,
        backlog_tokens=0 if out else rng.random() ** 3 * 16_000,
        prefill_tokens_per_s=8000.0,
        kv_usage=rng.random(),
        prefix_queries_tokens=asked,
        prefix_hits_tokens=asked * (0.55 + 0.3 * (k % 7) / 7),
        predicted_tokens=int(asked * (0.57 + 0.3 * (k % 7) / 7)),
        table_bytes=90,
        table_capacity_bytes=100,
        scrape_age_s=0.4,
    )


def decision_for(number: int, *, name: str = "vllm-0", tried: bool = False) -> Decision:
    made = decision(
        f"{random.Random(number).getrandbits(64):016x}",
        chosen=name,
        model="llama-3-8b",
        prompt_tokens=3400,
        matched_tokens=2048,
    )
    parts = {"backlog": 0.12, "prefill": 0.2, "stall": 0.05, "lora": 0.0, "failing": 0.0}
    names = [name, *(other for n in range(4) if (other := f"vllm-{n}") != name)]
    candidates = [
        structs.replace(
            list(made.candidates)[k > 0],
            name=EndpointName(names[k]),
            uncached_tokens=1000 + 400 * k,
            backlog_tokens=900 * k,
            in_flight=k + 1,
            score_s=sum(parts.values()) * (1 + 0.6 * k),
            parts_s={part: value * (1 + 0.6 * k) for part, value in parts.items()},
            excluded="failing" if k == 2 else "",
        )
        for k in range(4)
    ]
    would = WouldPick(
        "tried",
        "affinity",
        EndpointName("vllm-3" if tried else name),
        "prefix",
        agrees=not tried,
        more_cached_tokens=900 if tried else 0,
        more_s=-0.1125 if tried else 0.0,
    )
    return structs.replace(
        made,
        at_unix_s=time.time() - 50 + number,
        candidates=tuple(candidates),
        status=200,
        outcome="ended",
        ttft_s=0.18 if number % 3 == 0 else None,
        dry_run=would,
    )


def _explained(_: float) -> dict[str, Any]:
    shares = {"new": 0.52, "evicted": 0.27, "elsewhere": 0.12, "tail": 0.06, "restarted": 0.03}
    causes = [
        {
            "cause": cause.name,
            "title": cause.title,
            "tokens": round(1e6 * shares[cause.name]),
            "share_of_missed": shares[cause.name],
            "share_of_prompt": shares[cause.name] / 3,
            "servers": [{"name": "vllm-1", "tokens": 200_000, "full": 0.98}]
            if cause.name == "evicted"
            else [],
            "advice": cause.advice,
        }
        for cause in CAUSES
        if cause.name in shares
    ]
    return {"requests": 1842, "prompt_tokens": 3_000_000, "matched_tokens": 2_000_000, "hit_ratio": 0.667, "causes": sorted(causes, key=lambda c: -float(str(c["tokens"])))}  # fmt: skip


@asynccontextmanager
async def live_page(count: int) -> AsyncIterator[Scene]:
    ring = DecisionRing(maxlen=1000)
    waiting = WaitingTenant(priority=0, tenant="batch", requests=7, tokens=9000)
    flow = FlowStatus(
        tenants=(waiting,),
        model="llama-3-8b",
        oldest_s=0.4,
        requests={0: 7, 10: 2},
        tokens={0: 9000, 10: 500},
    )
    status = PickerStatus(policy="default", rule="least-cost", table_entries=48_210, flow=(flow,))
    board = a_board(
        ring,
        lambda: scene.status,
        explain=_explained,
        dry_run=lambda: {
            "policy": "tried",
            "rule": "affinity",
            "picks": 5120,
            "agreed": 4660,
            "refused": 20,
            "prompt_tokens": 17_400_000,
            "cached_tokens": 11_658_000,
            "more_cached_tokens": 870_000,
            "more_s": -306.0,
        },
    )
    scene = Scene(count, ring, status, board)
    for n in range(20):
        scene.turn(n)
        board.sample()
    for n in range(30):
        ring.append(decision_for(n, name=f"vllm-{n % count}", tried=n % 7 == 0))
    ring.append(
        RefusalRecord("refused-1", time.time(), 429, "deadline", "the first token would come too late")
    )
    server = an_admin(ring, lambda: scene.status, board=board)
    scene.url = f"http://{await server.start()}/"
    try:
        yield scene
    finally:
        await server.stop()
