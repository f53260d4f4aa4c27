"""Row 002-8: blocks that were computed after a selective load are kept apart from exact KV, and
subscribers do not hear of them.
"""

from __future__ import annotations

import dataclasses

import pytest

from model_server.core.engine import Engine, EngineConfig
from model_server.core.hashing import HASH_ALGORITHMS, BlockHash, BlockHasher, HashAlgorithm, PrefixScope
from model_server.core.request import NO_TOKEN, Request, RequestId, TokenId
from model_server.runners.cost import CostModel, CostRunner
from model_server.tiers.settings import SelectionSettings

PROMPT = [TokenId(token) for token in range(100, 164)]
SELECTIVE = SelectionSettings(ratio=0.25).cache_key


@dataclasses.dataclass
class ReportedBlocks:
    stored_hashes: list[BlockHash] = dataclasses.field(default_factory=list)
    removed_hashes: list[BlockHash] = dataclasses.field(default_factory=list)

    def stored(self, request: Request, *, first: int, end: int) -> None:
        self.stored_hashes += request.block_hashes[first:end]

    def removed(self, block_hash: BlockHash) -> None:
        self.removed_hashes.append(block_hash)

    def cleared(self) -> None:
        raise AssertionError("nobody clears")


def add_request(
    engine: Engine, name: str, *, approximation: str = "", prompt: list[TokenId] = PROMPT
) -> Request:
    request = Request(RequestId(name), list(prompt), max_tokens=2, arrival_s=0.0, approximation=approximation)
    engine.add(request)
    while engine.num_unfinished:
        engine.step(now=0.0)
        engine.kv_cache.check_integrity()
    return request


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)
def test_002_8_no_block_of_an_approximate_prefix_has_hash_of_exact_block(
    algorithm: HashAlgorithm,
) -> None:
    chains = []
    for scope in (
        PrefixScope(),
        PrefixScope(cache_salt=SELECTIVE),
        PrefixScope(approximation="sel:0.25"),
        PrefixScope(approximation="sel:0.5"),
        PrefixScope("a", "/a"),
        PrefixScope("a", "/a", approximation="sel:0.5"),
    ):
        chain: list[BlockHash] = []
        hasher = BlockHasher(algorithm, block_size_tokens=16)
        hasher.extend(chain, PROMPT, num_blocks=4, scope=scope)
        chains.append(chain)
    assert len({block for chain in chains for block in chain}) == 24


def test_002_8_no_exact_request_and_no_event_names_approximate_blocks() -> None:
    config = EngineConfig(num_blocks=12, block_size_tokens=16, eos_token_id=NO_TOKEN)
    engine = Engine(config, CostRunner(CostModel(), max_loras=1, next_token=lambda _: TokenId(7)))
    heard = engine.kv_cache.observer = ReportedBlocks()
    selective = add_request(engine, "selective", approximation=SELECTIVE)
    assert not heard.stored_hashes
    assert add_request(engine, "exact").num_cached_tokens == 0
    assert add_request(engine, "exact again").num_cached_tokens == 48
    assert add_request(engine, "selective again", approximation=SELECTIVE).num_cached_tokens == 48
    assert add_request(engine, "another ratio", approximation="sel:0.5").num_cached_tokens == 0
    for turn in range(4):
        add_request(engine, str(turn), prompt=[TokenId(1000 * turn + token) for token in range(1, 161)])
    assert heard.removed_hashes, "the pool is small"
    assert set(heard.removed_hashes) <= set(heard.stored_hashes)
    assert set(selective.block_hashes).isdisjoint(heard.stored_hashes)
