"""Requests for tests of the engine and its parts, and what became of them."""

import itertools
from collections.abc import Sequence

from model_server.core.engine import Engine
from model_server.core.hashing import BlockHash, BlockHasher, HashAlgorithm, PrefixScope
from model_server.core.kv_cache import KVCacheManager
from model_server.core.request import Adapter, Request, RequestId, TokenId

_numbers = itertools.count()


def request_of(
    prompt: int | Sequence[int],
    *,
    name: str = "",
    first: int | None = 0,
    max_tokens: int = 100,
    adapter: Adapter | str | None = None,
    salt: str = "",
    arrival_s: float = 0.0,
    ignore_eos: bool = False,
) -> Request:
    """Return a request. `prompt` is its tokens, or a number of tokens that count up from `first`. If `first`
    is None, they count from a number that no other request has. Without a name the request gets one that
    no other request has.
    """
    number = next(_numbers)
    start = 10_000 * (number + 1) if first is None else first
    tokens = range(start, start + prompt) if isinstance(prompt, int) else prompt
    return Request(
        request_id=RequestId(name or f"r{number}"),
        token_ids=[TokenId(token) for token in tokens],
        max_tokens=max_tokens,
        arrival_s=arrival_s,
        adapter=Adapter(adapter) if isinstance(adapter, str) and adapter else adapter or None,
        cache_salt=salt,
        ignore_eos=ignore_eos,
    )


def run_to_end(engine: Engine, *requests: Request) -> None:
    """Add the requests, and step until no request is left."""
    for request in requests:
        engine.add(request)
    while engine.num_unfinished:
        engine.step(now=0.0)
        engine.check_integrity()


def answered_tokens(request: Request) -> list[TokenId]:
    return request.token_ids[request.num_prompt_tokens :]


def block_ids(manager: KVCacheManager, request: Request) -> list[int]:
    """Return the blocks of a request, in the order of its tokens."""
    return [block.block_id for block in manager.table(request.request_id)]


def block_hashes_of(
    tokens: Sequence[int], *, block_tokens: int, algorithm: HashAlgorithm = "sha256"
) -> list[BlockHash]:
    """Return the hashes of all whole blocks of a prompt without a salt."""
    hashes: list[BlockHash] = []
    BlockHasher(algorithm, block_size_tokens=block_tokens).extend(
        hashes, tokens, num_blocks=len(tokens) // block_tokens, scope=PrefixScope()
    )
    return hashes
