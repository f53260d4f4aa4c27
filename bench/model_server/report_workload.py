"""Runs the hash table report's experiment on the block cache alone: generates its prompts, and counts which
prompts are found.

Hits are exact here, not timed. Requests come one after the other. Each request finds what it can, computes
the rest, grows by its answer, and is freed. Answers are random, as with sampling, so equal prompts differ
after the prompt.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from model_server.core.cache_options import CacheOptions
from model_server.core.kv_cache import KVCacheManager
from model_server.core.partial_cache import make_manager
from model_server.core.request import Request, RequestId, TokenId

BLOCK_TOKENS = 16
PROMPT_TOKENS = 15
FREQUENT_SEQUENCES = 20
NUM_REQUESTS = 1000
VOCABULARY = 50_000


@dataclass(slots=True)
class Found:
    """Sums over requests. A prompt counts as found if all of it is found except the token that has to be
    computed.
    """

    requests: int = 0
    prompts_found: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    covered_tokens: int = 0
    """Tokens of prompts that were found, including the one that is computed anyway."""
    all_tokens: int = 0
    """Tokens of prompts and answers."""

    @property
    def prompt_rate(self) -> float:
        return self.prompts_found / self.requests

    @property
    def token_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    @property
    def whole_sequence_rate(self) -> float:
        return self.covered_tokens / self.all_tokens


def prompts(p: float, *, seed: int, num_requests: int = NUM_REQUESTS) -> Iterator[list[int]]:
    """Yield the prompts of the report's generator. With probability p a prompt is one of a few frequent
    sequences, otherwise it is random tokens.
    """
    rng = random.Random(seed)
    frequent = [_random_tokens(rng, PROMPT_TOKENS) for _ in range(FREQUENT_SEQUENCES)]
    for _ in range(num_requests):
        yield rng.choice(frequent) if rng.random() < p else _random_tokens(rng, PROMPT_TOKENS)


def mixed_trace(*, seed: int, num_requests: int, drift_every: int | None = None) -> Iterator[list[int]]:
    """Yield longer prompts. Each has one of 60 beginnings, of which a few are frequent, and its own end. A
    third of the prompts are never used again. A burst of prompts that share nothing comes now and then, as
    from a crawler or a batch job. With `drift_every`, the six most frequent beginnings are replaced by new
    beginnings after each `drift_every` requests.
    """
    rng = random.Random(seed)
    beginnings = [_random_tokens(rng, rng.randrange(64, 320)) for _ in range(60)]
    weights = [1 / (rank + 1) for rank in range(60)]
    made = drifted = 0
    while made < num_requests:
        if drift_every and made // drift_every > drifted:
            drifted += 1
            beginnings[:6] = [_random_tokens(rng, rng.randrange(64, 320)) for _ in range(6)]
        burst = 40 if rng.random() < 0.01 else 0
        for _ in range(burst):
            yield _random_tokens(rng, 200)
        beginning = [] if rng.random() < 0.33 else rng.choices(beginnings, weights)[0]
        yield beginning + _random_tokens(rng, rng.randrange(20, 120))
        made += burst + 1


def run(
    requests: Iterable[list[int]],
    *,
    num_blocks: int,
    options: CacheOptions,
    answer_tokens: tuple[int, int],
    concurrency: int = 1,
    seed: int = 0,
) -> Found:
    """Serve each prompt. `concurrency` requests overlap. Each request grows to its end before its blocks are
    freed.
    """
    rng = random.Random(seed)
    manager = make_manager(
        num_blocks=num_blocks, block_size_tokens=BLOCK_TOKENS, enable_prefix_caching=True, options=options
    )
    found, live = Found(), list[Request]()
    for number, tokens in enumerate(requests):
        request = Request(
            request_id=RequestId(str(number)),
            token_ids=[TokenId(token) for token in tokens],
            max_tokens=1_000_000,
            arrival_s=0.0,
        )
        _prefill(manager, request, found)
        live.append(request)
        for _ in range(rng.randint(*answer_tokens)):
            _decode(manager, request, rng.randrange(VOCABULARY))
        found.all_tokens += len(request.token_ids)
        if len(live) == concurrency:
            # All requests end in one step, like the requests of a batch of equal lengths.
            for ended in live:
                manager.free(ended)
            live.clear()
        manager.end_step()
    manager.check_integrity()
    return found


def expected_rate(p: float, *, bound: int, answer_tokens: tuple[int, int]) -> float:
    """Return the share of the report's prompts that should be found if `bound` unused blocks keep their
    content.

    Each request has the chance p/20 to be a given frequent sequence, and every request leaves its blocks
    behind. So the sequence is found if it comes again within bound / (blocks of a request) requests. The
    first time of each sequence finds nothing.
    """
    shortest, longest = answer_tokens
    lengths = [PROMPT_TOKENS + answer for answer in range(shortest, longest + 1)]
    blocks_each = sum(-(-length // BLOCK_TOKENS) for length in lengths) / len(lengths)
    remembered = bound / blocks_each
    comes_again: float = 1 - (1 - p / FREQUENT_SEQUENCES) ** remembered
    return (p - FREQUENT_SEQUENCES / NUM_REQUESTS) * comes_again


def linear_fit(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Return slope, intercept and R squared of the least-squares line."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    var_x = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / var_x
    intercept = mean_y - slope * mean_x
    rest = sum((y - slope * x - intercept) ** 2 for x, y in points)
    return slope, intercept, 1 - rest / sum((y - mean_y) ** 2 for _, y in points)


def _prefill(manager: KVCacheManager, request: Request, found: Found) -> None:
    prefix = manager.get_computed(request)
    num_prompt = request.num_prompt_tokens
    if not manager.allocate(request, prefix, num_new_tokens=num_prompt - prefix.num_tokens):
        raise ValueError("the cache is too small for the requests that overlap")
    request.num_computed_tokens = num_prompt
    manager.computed(request)
    manager.take_copies()
    whole = prefix.num_tokens == num_prompt - 1
    found.requests += 1
    found.prompts_found += whole
    found.prompt_tokens += num_prompt
    found.hit_tokens += prefix.num_tokens
    found.covered_tokens += num_prompt if whole else prefix.num_tokens


def _decode(manager: KVCacheManager, request: Request, token: int) -> None:
    request.token_ids.append(TokenId(token))
    if not manager.append(request, num_new_tokens=1):
        raise ValueError("the cache is too small for the requests that overlap")
    request.num_computed_tokens += 1
    manager.computed(request)
    manager.take_copies()


def _random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]
