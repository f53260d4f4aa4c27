"""Random histories of a KV cache, as text that both sides read:
vLLM's manager when they are recorded, ours in the test.

A trace is a small cache and a list of steps. Prompts share beginnings, adapters and salts often enough that
most lookups hit something, and the cache is small enough that most admissions evict. Standard library only:
the recorder runs in the environment of vLLM, where nothing of this project is installed.
"""

import bz2
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

DATA_FILE = Path(__file__).parent / "data" / "kv_cache_traces.json.bz2"
SCOPES: tuple[tuple[str, str, str], ...] = (
    ("", "", ""),
    ("alpha", "/adapters/alpha", ""),
    ("", "", "tenant-1"),
    ("beta", "/adapters/beta", "tenant-2"),
)
"""Adapter name, adapter path, cache salt."""


class Prompt(NamedTuple):
    """The prompt has `shared` tokens of beginning `family`, then `own` tokens that no other prompt has."""

    family: int
    shared: int
    own: int
    number: int
    scope: int

    def tokens(self) -> list[int]:
        shared = [1000 * self.family + i for i in range(self.shared)]
        return shared + [100_000 + 1000 * self.number + i for i in range(self.own)]


class Admit(NamedTuple):
    prompt: Prompt
    budget_tokens: int
    """The largest number of tokens outside the cache that the first chunk may hold."""


class Go(NamedTuple):
    """Compute up to this many of the waiting tokens. If no token waits, sample a token and compute it."""

    request: int
    budget_tokens: int


class Free(NamedTuple):
    request: int


Step = Admit | Go | Free


class Outcome(NamedTuple):
    """What a manager did in one step."""

    hit_tokens: int
    """-1 if the step looks nothing up."""
    new_blocks: list[int] | None
    """None if the step was refused for lack of room."""
    free_order: int
    """`order_digest` of the free blocks afterwards."""


class Trace(NamedTuple):
    num_blocks: int
    block_tokens: int
    steps: list[Step]
    outcomes: list[Outcome]
    last_hashes: list[str]
    """For each admission, the first 8 hex digits of the hash of the last full block. The text is empty for a
    shorter prompt.
    """


def order_digest(block_ids: Iterable[int]) -> int:
    digest = 0
    for block_id in block_ids:
        digest = (digest * 31 + block_id + 1) % 65_521
    return digest


def next_step(rng: random.Random, *, block_tokens: int, live: list[int], admissions: int) -> Step:
    """Return a step that fits the live requests: it is drawn while recording, when refusals are known."""
    chance = rng.random()
    if not live or (chance < 0.4 and len(live) < 5):
        prompt = Prompt(
            family=rng.randrange(3),
            shared=rng.randrange(5 * block_tokens),
            own=rng.randrange(1, 2 * block_tokens),
            number=admissions,
            scope=rng.choice((0, 0, 0, 0, 1, 2, 3)),
        )
        return Admit(prompt, rng.choice((block_tokens, 3 * block_tokens, 100 * block_tokens)))
    if chance < 0.8:
        return Go(rng.choice(live), rng.choice((1, block_tokens, 4 * block_tokens)))
    return Free(rng.choice(live))


def sampled_token(request: int, position: int) -> int:
    """Return a token. Equal prompts give equal answers now and then, so that duplicates occur."""
    return 7 + (position % 5) + (request % 2)


def write(traces: list[Trace], path: Path = DATA_FILE) -> None:
    plain = [
        [
            trace.num_blocks,
            trace.block_tokens,
            [
                ["a", *step.prompt, step.budget_tokens]
                if isinstance(step, Admit)
                else ["g", *step]
                if isinstance(step, Go)
                else ["f", *step]
                for step in trace.steps
            ],
            [list(outcome) for outcome in trace.outcomes],
            trace.last_hashes,
        ]
        for trace in traces
    ]
    path.write_bytes(bz2.compress(json.dumps(plain, separators=(",", ":")).encode()))


def read(path: Path = DATA_FILE) -> list[Trace]:
    plain = json.loads(bz2.decompress(path.read_bytes()))
    return [
        Trace(blocks, size, [_step(raw) for raw in steps], [Outcome(*raw) for raw in outcomes], hashes)
        for blocks, size, steps, outcomes, hashes in plain
    ]


def _step(raw: list[Any]) -> Step:
    kind, *rest = raw
    if kind == "a":
        return Admit(Prompt(*rest[:-1]), rest[-1])
    return Go(*rest) if kind == "g" else Free(*rest)
